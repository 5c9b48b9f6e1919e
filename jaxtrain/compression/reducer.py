"""Sums of gradients over the devices that have the same part of a leaf: a field of the experiment.

Every algorithm's `all_reduce` is a reducer; a reducer may also combine several algorithms.
"""

from __future__ import annotations

from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rounded import Rounded
from jaxtrain.compression.compressed import Compressed

ExactReducer = Lax | Ring | Recursive | Hierarchical
"""Reducers that change no sum beyond the order in which it is rounded."""

Reducer = ExactReducer | Rounded | Compressed
