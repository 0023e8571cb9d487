"""What a shell completes where a model is expected. Imports no torch and asks no network."""

from pathlib import Path


def model_names(incomplete: str) -> list[str]:
    """Return short names, repositories in the cache and paths of models that begin so."""
    from bough.hub import catalog
    from bough.hub.cache import contents

    names = [card.name for card in catalog.cards()]
    names += sorted({str(each) for each in contents() if each.path.suffix == ".gguf"})
    return [name for name in names if name.startswith(incomplete)] + _paths(incomplete)


def pulled_names(incomplete: str) -> list[str]:
    """Return the short names that begin so and can be fetched."""
    from bough.hub import catalog

    names = [card.name for card in catalog.cards() if card.target is not None]
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str) -> list[str]:
    """Return folders and .gguf files that begin so, as they were begun."""
    head, slash, start = incomplete.rpartition("/")
    try:
        inside = sorted(Path(f"{head}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return []
    shown = [each for each in inside if each.name.startswith(start) and not each.name.startswith(".")]
    files = [f"{head}{slash}{each.name}" for each in shown if each.suffix == ".gguf"]
    return files + [f"{head}{slash}{each.name}/" for each in shown if each.is_dir()]
