"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .choice import Collectives as Collectives
from .hierarchical import Hierarchical as Hierarchical
from .lax_form import Lax as Lax
from .recursive import Recursive as Recursive
from .ring import Ring as Ring
from .rounded import Rounded as Rounded
from .rows import Padded as Padded
from .rows import Ragged as Ragged

__all__: list[str]
