"""The systems that GNL is compared with, as methods of the same trainer; ``catalogue`` lists them."""
