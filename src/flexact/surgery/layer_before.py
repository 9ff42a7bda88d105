"""The linear layer or convolution whose output a site takes, for candidates that have an initialisation for it."""

from __future__ import annotations

from torch import Tensor, nn

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_PASSING = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "Convolution", "ScaledDotProduct", "Embedding")
"""The names of autograd nodes that multiply by a weight begin with these."""


def layer_in_sequence(model: nn.Module, name: str) -> nn.Module | None:
    """Return the layer before an activation by the order of nn.Sequential, across normalisation, dropout and reshaping;
    None if the order of modules does not tell."""
    path, _, attribute = name.rpartition(".")
    parent = model.get_submodule(path)
    if not name or type(parent).forward is not nn.Sequential.forward or attribute not in parent._modules:
        return None
    children = list(parent._modules)
    for child in reversed(children[: children.index(attribute)]):
        module = parent._modules[child]
        if isinstance(module, LAYERS):
            return module
        if not isinstance(module, _PASSING) and "norm" not in type(module).__name__.lower():
            return None
    return layer_in_sequence(model, path)


def layer_in_graph(h: Tensor, layers: dict[int, nn.Module]) -> nn.Module | None:
    """Return the one layer that the tensor was computed from, by autograd's graph; None if there are none or several.

    layers: by the id of their weight.
    """
    found: set[nn.Module | None] = set()
    waiting, visited = [h.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        before = [following for following, _ in node.next_functions if following is not None]
        if node.name().startswith(_PRODUCTS):
            # A linear layer's weight is transposed first, so its leaf is one node further.
            leaves = [*before, *(leaf for one in before for leaf, _ in one.next_functions)]
            weights = {id(getattr(leaf, "variable", None)) for leaf in leaves}
            found |= {layers[one] for one in weights & layers.keys()} or {None}
        else:
            waiting += before
    return found.pop() if len(found) == 1 else None
