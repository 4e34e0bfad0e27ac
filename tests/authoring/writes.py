"""Views and writes of a random program."""

from __future__ import annotations

import dataclasses

import numpy as np

from authoring.block import CACHE, DOMAIN, SHAPES, TOKEN, Block, Name
from authoring.values import Values


class Writes(Values):
    """Every operator that writes where it stands, on a cache or on a view of one."""

    def write(self, block: Block) -> None:
        if not block.writable and not self.slip():
            return self.read(block)
        if self.chance(6):
            return self.scatter_new(block)
        cache = self.pick(block.writable or list(block.current))
        if self.slip():
            cache = self.pick(list(block.current))
        target = self.cache_name(block, cache)
        if self.slip():
            target = self.pick([n for n in block.names if n.kind == "tensor"])
        if self.chance(5):
            target = self.view_of(block, target)
        result = self.pick(WRITERS)(self, block, target)
        if result.shape != CACHE and int(np.prod(result.shape)) == int(np.prod(CACHE)):
            result = self.reshape(block, result, CACHE)
        if result.shape == CACHE and not self.slip():
            block.current[cache] = result

    def scatter_new(self, block: Block) -> None:
        """A standard operator on what nobody lent makes a new value, as ONNX says."""
        whole = [n for n in block.tensors if n.shape == CACHE and n.cache not in block.writable]
        if whole:
            target = dataclasses.replace(self.pick(whole[::-1]), cache=None)
            self.pick(SCATTERS)(self, block, target)

    def view(self, block: Block) -> None:
        cache = self.pick(list(block.current))
        result = self.view_of(block, self.cache_name(block, cache))
        if result.shape == CACHE and self.chance(2) and cache in block.writable:
            block.current[cache] = result

    def reread(self, block: Block) -> None:
        """A name or a view is kept over a write, and read, written or returned after it."""
        cache = self.pick(list(block.current))
        kept = self.view_of(block, block.current[cache])
        if cache in block.writable:
            block.current[cache] = self.pick(WRITERS)(self, block, block.current[cache])
        axes = block.constant(np.array(range(len(kept.shape))))
        inputs = [kept.value, axes.value]
        total = block.node("ReduceSum", inputs, (), keepdims=0, hint="sum", kind="sum")
        token = next(n for n in reversed(block.tensors) if n.shape == TOKEN and n.cache is None)
        self.bounded(block, block.node("Add", [token.value, total.value], TOKEN, hint="a"))

    def view_of(self, block: Block, name: Name) -> Name:
        x, rank, dtype = name.value, len(name.shape), name.dtype
        kind = self.below(5)
        if kind == 0:
            return block.node("Identity", [x], name.shape, cache=name.cache, hint="i", dtype=dtype)
        if kind == 1 and int(np.prod(name.shape)) == int(np.prod(CACHE)):
            return self.reshape(block, name, self.pick(SHAPES))
        if kind == 2 and rank:
            axis = self.below(rank + 1)
            flat = (int(np.prod(name.shape[:axis])), int(np.prod(name.shape[axis:])))
            return block.node(
                "Flatten", [x], flat, cache=name.cache, hint="f", dtype=dtype, axis=axis
            )
        axis = self.below(rank + 1)
        axes = block.constant(np.array([axis]))
        longer = (*name.shape[:axis], 1, *name.shape[axis:])
        wide = block.node(
            "Unsqueeze", [x, axes.value], longer, cache=name.cache, hint="u", dtype=dtype
        )
        if kind == 3:
            return wide
        return block.node(
            "Squeeze",
            [wide.value, axes.value],
            name.shape,
            cache=name.cache,
            hint="s",
            dtype=dtype,
        )

    def reshape(self, block: Block, name: Name, shape: tuple[int, ...]) -> Name:
        target = block.constant(np.array(shape))
        return block.node(
            "Reshape",
            [name.value, target.value],
            shape,
            cache=name.cache,
            hint="r",
            dtype=name.dtype,
        )

    def cache_update(self, block: Block, target: Name) -> Name:
        rank = len(target.shape)
        if rank == 0:
            return self.assign(block, target)
        axis = 1 if target.shape == CACHE else self.below(rank)
        capacity = target.shape[axis]
        length = self.pick([n for n in (1, 2) if n <= capacity])
        circular = self.chance(4)
        shape = (*target.shape[:axis], length, *target.shape[axis + 1 :])
        values = self.content(block, shape)
        batch_axis = None
        if target.shape == CACHE and self.chance(4):
            position, batch_axis = self.rows(block), 0
        else:
            position = self.number(block, capacity - length + 1)
        return block.node(
            "CacheUpdate",
            [target.value, values.value, position.value],
            target.shape,
            domain=DOMAIN,
            cache=target.cache,
            hint="cu",
            axis=axis - rank if self.chance(2) else axis,
            batch_axis=batch_axis,
            mode="circular" if circular else None,
        )

    def assign(self, block: Block, target: Name) -> Name:
        value = self.content(block, target.shape)
        return block.node(
            "Assign",
            [target.value, value.value],
            target.shape,
            domain=DOMAIN,
            cache=target.cache,
            hint="as",
        )

    def reorder(self, block: Block, target: Name) -> Name:
        if target.shape != CACHE:
            return self.assign(block, target)
        return block.node(
            "CacheReorder",
            [target.value, self.rows(block).value],
            CACHE,
            domain=DOMAIN,
            cache=target.cache,
            hint="cr",
            batch_axis=0,
        )

    def tensor_scatter(self, block: Block, target: Name) -> Name:
        if target.shape != CACHE:
            return self.cache_update(block, target)
        inputs = [target.value, self.token(block).value, self.rows(block).value]
        return block.node("TensorScatter", inputs, CACHE, cache=target.cache, hint="ts")

    def scatter_elements(self, block: Block, target: Name) -> Name:
        rank = len(target.shape)
        if rank == 0:
            return self.assign(block, target)
        axis = self.below(rank)
        if target.shape == CACHE and self.chance(3):  # all of it, moved along the axis
            shape = target.shape
            indices = block.constant(np.roll(np.indices(shape)[axis], 1, axis))
        else:
            shape = (*target.shape[:axis], 1, *target.shape[axis + 1 :])
            indices = block.constant(np.full(shape, self.below(target.shape[axis])))
        values = self.content(block, shape)
        return block.node(
            "ScatterElements",
            [target.value, indices.value, values.value],
            target.shape,
            cache=target.cache,
            hint="se",
            axis=axis,
        )

    def scatter_nd(self, block: Block, target: Name) -> Name:
        if not target.shape:
            return self.assign(block, target)
        indices = block.constant(np.array([[self.below(target.shape[0])]]))
        values = self.content(block, (1, *target.shape[1:]))
        inputs = [target.value, indices.value, values.value]
        return block.node("ScatterND", inputs, target.shape, cache=target.cache, hint="sn")


SCATTERS = (Writes.tensor_scatter, Writes.scatter_elements, Writes.scatter_nd)
WRITERS = (
    Writes.cache_update,
    Writes.cache_update,
    Writes.assign,
    Writes.reorder,
    Writes.tensor_scatter,
    Writes.scatter_elements,
    Writes.scatter_nd,
)
