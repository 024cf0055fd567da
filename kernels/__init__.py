"""The objective's arithmetic, one module a step, imported as ``fastgnl.kernels``.

``philox`` draws the random words, ``candidates`` turns them into candidate sets and the prior,
``terms`` computes the three loss terms (the readable reference: gradients by autograd),
``closed_form`` their gradients in closed form. Every faster backend is compared with these.
"""
