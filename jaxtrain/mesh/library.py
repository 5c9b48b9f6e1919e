"""Mesh files that come with jaxtrain; each can be given by its name alone."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.violations import did_you_mean

FOLDER = Path(__file__).parents[1] / "meshes"


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def file_of(mesh: str | Path) -> str | Path:
    """Returns the mesh file of that name, or the path itself if there is none."""
    return FOLDER / f"{mesh}.toml" if str(mesh) in names() else mesh


def nearest(path: Path) -> str:
    """Returns the end of an error about a missing mesh file: the name that may have been meant."""
    if path.stem in names():
        return f"; jaxtrain comes with a mesh of that name: give {path.stem!r} alone"
    if not path.suffix and path.name == str(path):
        if not (shipped := names()):
            return f", and {FOLDER} has none: is it a link that was not followed?"
        return f", and jaxtrain comes with none of that name{did_you_mean(path.name, shipped)}"
    siblings = sorted(str(file) for file in path.parent.glob("*.toml"))
    return did_you_mean(str(path), siblings) if siblings else ""
