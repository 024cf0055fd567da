"""WebVision 1.0, whole or its first classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastgnl.errors import check
from fastgnl.formats.folders import of_files, read_classes, read_pairs
from fastgnl.formats.listing import Listing, require


@dataclass(frozen=True)
class WebVision:
    """WebVision 1.0: SOURCE/info/train_filelist_google.txt, SOURCE/google/q0001/*.jpg, and so on.

    Training lists info/train_filelist_google.txt and info/train_filelist_flickr.txt have lines "google/q0001/X.jpg 0",
    with paths below SOURCE (where google.tar, google_resized_256.tar and their like unpack). info/val_filelist.txt
    has lines "val000001.jpg 0", with images in SOURCE/val_images_256. info/synsets.txt, where it is there, names the
    1000 classes. Labels of training images come from web searches; those of the validation images are clean."""

    split: Literal["train", "val"] = "train"
    """Which images."""
    sources: tuple[Literal["google", "flickr"], ...] = ("google",)
    """Where the training images were found."""
    num_classes: int | None = None
    """Keep only the first classes (50 for mini-WebVision)."""

    def listing(self, source: Path) -> Listing:
        layout = "WebVision 1.0 with its folders info, google, flickr and val_images_256"
        check(len(self.sources) > 0, "sources is empty, wanted google, flickr or both")
        train = self.split == "train"
        pairs = []
        for name in dict.fromkeys(self.sources) if train else ("val",):
            require(source / (name if train else "val_images_256"), layout)
            file = f"train_filelist_{name}.txt" if train else "val_filelist.txt"
            pairs += read_pairs(source / "info" / file, layout)
        named = source / "info" / "synsets.txt"
        classes = read_classes(named, layout) if named.exists() else [str(c) for c in range(1000)]
        names = [name if train else f"val_images_256/{name}" for name, _ in pairs]
        labels = [label for _, label in pairs]
        return of_files(source / "info", source, classes, names, labels, None if train else labels, self.num_classes)
