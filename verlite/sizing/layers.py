"""From runs with few layers to the whole model, exactly.

Live bytes at a fixed point of a pass (the forward pass of layer i, the head, the backward pass of
layer i, the optimizer step) are linear in the number of layers and in i, because all layers are
alike. The first and the last layer differ from those between: the first has no layer before it to
free, and FSDP prefetches nothing for it. So two runs, with 3 and 4 layers, determine everything:

    first, last, head, step:   a + b L
    layers 1 to L-2:           a + b L + c i

The peak of a pass is the largest of these at the model's L.
"""

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from verlite.engine.folder import load_config
from verlite.sizing.tracker import Segment
from verlite.spec.roles import ModelSpec

SHORT, LONG = 3, 4
"""Layers of the two runs."""


def with_layers(model: ModelSpec, layers: int) -> dict[str, object]:
    """Return the override_config that gives a model this number of layers."""
    config = load_config(model)
    before = config.num_hidden_layers
    changes: dict[str, object] = {"num_hidden_layers": layers}
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == before and hasattr(config, name):
            changes[name] = value[:layers]  # a value per layer, such as layer_types
    return {**model.override_config, **changes}


def are_alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether all layers have the same parameters."""
    shapes = {
        tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters()) for layer in layers
    }
    return len(shapes) == 1


def peak(short: list[Segment], long: list[Segment], layers: int) -> int:
    """Return the most live bytes of a pass through `layers` layers.

    Args:
        short: segments of the run with SHORT layers. long: of the run with LONG layers.
        layers: of the model, at least LONG.
    """
    few, more = _by_place(short), _by_place(long)
    return max(_peak(few[place], more[place], layers) for place in more)


def _by_place(segments: list[Segment]) -> dict[tuple[int, str], list[int]]:
    """Return the peaks of each micro-batch and kind of place, by the layer's number."""
    places: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
    micro_batch = 0
    for segment in segments:
        if segment.place == ("forward", 0):
            micro_batch += 1
        name, number = str(segment.place[0]), int((*segment.place, 0)[1])
        places[micro_batch, name][number] = segment.peak
    return {place: [peaks[i] for i in range(len(peaks))] for place, peaks in places.items()}


def _peak(short: list[int], long: list[int], layers: int) -> int:
    def line(at_short: int, at_long: int) -> int:
        return at_short + (at_long - at_short) * (layers - SHORT)

    ends = max(line(short[0], long[0]), line(short[-1], long[-1]))
    if len(long) == 1:
        return ends
    by_number = long[2] - long[1]
    second = line(short[1], long[1])
    return max(ends, second, second + by_number * (layers - 3))
