"""Saved state: whole or refused, and nothing changes when it is refused."""

import os
import struct
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnx_inplace import Session
from onnx_inplace.compiler import errors, formats, schema
from onnx_inplace.compiler.contract import Access
from onnx_inplace.dsl import FLOAT, FLOAT16, Alias, Mutable, Paged, kv, model, op
from onnx_inplace.runner import checkpoint, page_memory
from onnx_inplace.runner.page import Use
from onnx_inplace.runner.page_memory import PageMemory
from onnx_inplace.runner.pages import PagedCache

DIMS = 2, 2, 32, 64
HEAD = 32  # bytes in front of the head


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 2, n, 64)).astype(np.float16)


def mixed(*, sparse_ids: bool = False) -> PagedCache:
    """Pages of every format, one partly filled, one shared, with a hole among the ids."""
    cache = PagedCache(DIMS, np.float16, sparse_ids=sparse_ids)
    for seed, name in enumerate(formats.BUILTIN):
        page = cache.allocate_page("FLOAT16", -(10**12) + seed if sparse_ids else None)
        cache.write(page, tokens(32 if seed else 7, seed), 0)
        cache.convert(page, name)
    pages = list(cache)
    cache.share(pages[2])
    cache.free(pages[4])
    return cache


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.pages"


def refused(path: Path, data: bytes) -> errors.SavedStateError:
    path.write_bytes(data)
    with pytest.raises(errors.SavedStateError) as caught:
        checkpoint.load(path)
    assert caught.value.path == str(path) and caught.value.reason
    return caught.value


def with_head(data: bytes, change: Any) -> bytes:
    """The file with another head, and checksums that fit it."""
    length = struct.unpack_from("<Q", data, 16)[0]
    head = schema.SavedStateProto.FromString(data[HEAD : HEAD + length])
    begin = (HEAD + length + 63) // 64 * 64
    change(head)
    encoded = head.SerializeToString()
    moved = HEAD + len(encoded)
    payload = bytes(-moved % 64) + data[begin:]
    sizes = struct.pack("<QQ", len(encoded), moved + len(payload))
    checksum = zlib.crc32(encoded, zlib.crc32(sizes))
    return data[:12] + struct.pack("<I", checksum) + sizes + encoded + payload


# -- what is saved comes back


@pytest.mark.parametrize("sparse_ids", [False, True])
@pytest.mark.parametrize("map", [False, True])
def test_a_cache_comes_back_byte_for_byte(path: Path, sparse_ids: bool, map: bool) -> None:
    cache = mixed(sparse_ids=sparse_ids)
    cache.save(path)
    again = PagedCache.load(path, map=map)
    assert again.snapshot() == cache.snapshot()
    assert (again.name, again.formats) == (cache.name, cache.formats)
    for page in cache:
        np.testing.assert_array_equal(again.page(page).decode(), cache.page(page).decode())
        assert again.page(page).address % 64 == 0


def test_a_cache_comes_back_from_its_message() -> None:
    cache = mixed()
    proto = schema.PagedCacheProto.FromString(cache.to_proto().SerializeToString())
    assert PagedCache.from_proto(proto).snapshot() == cache.snapshot()
    proto.pages[0].tensor.raw_data = bytes(proto.pages[0].tensor.raw_data)[:-1] + b"x"
    with pytest.raises(ValueError, match="damaged"):
        PagedCache.from_proto(proto)


def test_limits_of_formats_are_saved(path: Path) -> None:
    cache = PagedCache(DIMS, np.float32, [formats.INT8, formats.INT4])
    cache.allocate_page("INT8")
    cache.save(path)
    again = PagedCache.load(path)
    assert again.allowed == cache.allowed and again.elem_type == np.float32
    with pytest.raises(errors.PageError):
        again.allocate_page("FLOAT16")


def test_a_format_that_an_author_made_is_saved_with_its_declaration(path: Path) -> None:
    own = formats.PageFormat("INT8G", formats.INT4.value, formats.INT4.value)
    cache = PagedCache(DIMS, np.float16)
    cache.allocate_page(own)
    cache.write(0, tokens(32), 0)
    cache.save(path)
    again = PagedCache.load(path)
    assert again.page(0).format == own and again.snapshot() == cache.snapshot()


def test_nothing_is_a_state_too(path: Path) -> None:
    checkpoint.save(path, {})
    assert checkpoint.load(path) == {}
    PagedCache(DIMS, np.float16).save(path)
    assert len(PagedCache.load(path)) == 0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(24).reshape(4, 6).T,
        np.arange(6, dtype=np.int16)[::-2],
        np.array(7, np.uint64),
        np.zeros((3, 0, 2), np.float16),
        np.array([True, False]),
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([1.5, -2], ml_dtypes.float8_e4m3fn),
        np.array([1 + 2j], np.complex64),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_arrays_come_back_with_type_and_shape(path: Path, array: np.ndarray) -> None:
    checkpoint.save(path, {"a": array})
    again = checkpoint.load(path)["a"]
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes() and again.flags.c_contiguous


@pytest.mark.parametrize("value", [3, [1.0], None, np.array(["a"], object), np.array(["a"])])
def test_what_is_no_storage_is_not_saved(path: Path, value: object) -> None:
    with pytest.raises(errors.BindingError) as caught:
        checkpoint.save(path, {"x": value})
    assert caught.value.name == "x" and not path.exists()


def test_arrays_and_caches_stand_in_one_file(path: Path) -> None:
    state = {"k": mixed(), "lengths": np.array([3, 5]), "v": mixed(sparse_ids=True)}
    checkpoint.save(path, state)
    again = checkpoint.load(path)
    assert sorted(again) == sorted(state)
    assert all(again[n].snapshot() == state[n].snapshot() for n in "kv")
    np.testing.assert_array_equal(again["lengths"], [3, 5])
    with pytest.raises(errors.SavedStateError):
        PagedCache.load(path)


def test_files_of_other_byte_order_are_the_same_files(path: Path) -> None:
    """Case 89: what a big-endian machine holds is saved little-endian."""
    native = np.arange(5, dtype=np.float32)
    checkpoint.save(path, {"a": native})
    expected = path.read_bytes()
    checkpoint.save(path, {"a": native.astype(">f4")})
    assert path.read_bytes() == expected
    foreign = np.zeros(5, ">f4")
    checkpoint.restore(path, {"a": foreign})
    np.testing.assert_array_equal(foreign, native)


def test_pages_are_refused_where_kernels_would_misread_them(path: Path, monkeypatch) -> None:
    """Case 89."""
    mixed().save(path)
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(errors.SavedStateError, match="little-endian"):
        PagedCache.load(path)


def test_a_file_made_by_hand_from_the_description_is_read(path: Path) -> None:
    """Case 89: magic, version, CRC-32, sizes, head, padding, little-endian numbers."""
    content = np.array([1, -2, 3], "<i4").tobytes()
    head = schema.SavedStateProto()
    message = head.arrays.add(crc32=zlib.crc32(content))
    message.tensor.name, message.tensor.data_type = "x", 6  # INT32
    message.tensor.dims.append(3)
    encoded = head.SerializeToString()
    begin = (HEAD + len(encoded) + 63) // 64 * 64
    sizes = struct.pack("<QQ", len(encoded), begin + len(content))
    checksum = zlib.crc32(sizes + encoded)
    data = b"\x8bONNXKV\n" + struct.pack("<II", 1, checksum) + sizes + encoded
    path.write_bytes(data + bytes(begin - len(data)) + content)
    np.testing.assert_array_equal(checkpoint.load(path)["x"], [1, -2, 3])


# -- what is damaged is refused


def test_every_byte_of_a_file_is_checked(path: Path) -> None:
    """Case 88: one flipped bit, anywhere."""
    cache = PagedCache((2, 1, 16, 32), np.float16)
    cache.allocate_page("INT4")
    checkpoint.save(path, {"cache": cache, "n": np.arange(3)})
    data = path.read_bytes()
    for at in range(len(data)):
        refused(path, data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])


def test_a_file_that_is_cut_off_or_longer_is_refused(path: Path) -> None:
    mixed().save(path)
    data = path.read_bytes()
    for length in (0, 1, 31, 32, 100, len(data) // 2, len(data) - 1):
        refused(path, data[:length])
    refused(path, data + b"\0")


@pytest.mark.parametrize("data", [b"hello", b"\x08\x0d" * 100, b"PK\x03\x04" * 50])
def test_foreign_files_are_refused(path: Path, data: bytes) -> None:
    refused(path, data)


def test_a_missing_file_is_not_found(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PagedCache.load(path)


def test_a_later_version_is_refused(path: Path) -> None:
    mixed().save(path)
    data = path.read_bytes()
    assert "version 2" in refused(path, data[:8] + struct.pack("<I", 2) + data[12:]).reason


def fields(message: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all fields that say something: absent, they would say something else."""
    found = []
    for field, value in message.ListFields():
        if field.message_type or field.is_repeated or value != field.default_value:
            found.append((*path, field.name))
        for k, item in enumerate(schema.each(value) if field.message_type else ()):
            where = (*path, field.name, k) if field.is_repeated else (*path, field.name)
            found += fields(item, where)
    return found


def cleared(message: Any, path: tuple[Any, ...]) -> None:
    """Remove one field."""
    for part in path[:-1]:
        message = message[part] if isinstance(part, int) else getattr(message, part)
    message.ClearField(path[-1])


NO_LOSS = {"name", "sparse_ids"}
"""What has a meaning when it is absent: no name, dense ids."""


def test_a_head_without_any_of_its_facts_is_refused(path: Path) -> None:
    """Case 86: types, scales, zero points, groups, rotation, checksums: nothing can be left out."""
    cache = PagedCache(DIMS, np.float16, [formats.INT4, formats.INT8])
    for name in ("INT4", "INT8"):
        cache.allocate_page(name)
    cache.save(path)
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data, 16)[0]
    head = schema.SavedStateProto.FromString(data[HEAD : HEAD + length])
    removed = [p for p in fields(head) if p[-1] not in NO_LOSS and p != ("caches",)]
    assert len(removed) > 60
    for field in removed:
        if field[:4] == ("caches", 0, "type", "sequence_type") and "tensor_type" in field:
            continue  # the carrier, for tools that know no pages
        if field[-1] == "allowed_quantized_type":
            continue  # absent: any
        refused(path, with_head(data, lambda h, f=field: cleared(h, f)))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.caches[0].pages[0].__setattr__("fill", 33),
        lambda h: h.caches[0].pages[0].__setattr__("fill", -1),
        lambda h: h.caches[0].pages[0].__setattr__("owners", 0),
        lambda h: h.caches[0].pages[1].__setattr__("id", 0),
        lambda h: h.caches[0].pages[0].__setattr__("id", -1),
        lambda h: h.caches[0].pages[-1].__setattr__("id", 2**40),
        lambda h: h.caches[0].pages[0].tensor.__setattr__("quantized_type", "INT3"),
        lambda h: h.caches[0].pages[0].tensor.__setattr__("quantized_type", "FP8_E5M2"),
        lambda h: h.caches[0].pages[0].tensor.dims.__setitem__(3, 32),
        lambda h: h.caches[0].quantizations[0].__setattr__("version", 99),
        lambda h: h.caches.append(h.caches[0]),
        lambda h: h.caches[0].pages.pop(),
        lambda h: h.MergeFromString(b"\xa0\x06\x01"),
    ],
)
def test_a_head_that_contradicts_itself_is_refused(path: Path, change: Any) -> None:
    mixed().save(path)
    refused(path, with_head(path.read_bytes(), change))


def test_the_checked_way_of_changing_a_head_is_accepted(path: Path) -> None:
    """Else the tests before would prove nothing."""
    cache = mixed()
    cache.save(path)
    path.write_bytes(
        with_head(path.read_bytes(), lambda h: h.caches[0].pages[0].__setattr__("fill", 3))
    )
    assert PagedCache.load(path).page(0).fill == 3


# -- writing


def test_a_file_is_replaced_when_the_new_one_is_complete(path: Path, monkeypatch) -> None:
    mixed().save(path)
    before = path.read_bytes()

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        PagedCache(DIMS, np.float16).save(path)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_two_caches_in_one_folder_keep_apart(path: Path) -> None:
    """Case 92."""
    first, second = mixed(), mixed(sparse_ids=True)
    first.save(path)
    second.save(path.with_suffix(".other"))
    assert PagedCache.load(path).snapshot() == first.snapshot()
    assert PagedCache.load(path.with_suffix(".other")).snapshot() == second.snapshot()


def test_saving_copies_no_page(path: Path) -> None:
    cache = PagedCache((2, 8, 256, 128), np.float16)
    cache.allocate_pages(4, "FLOAT16")
    cache.save(path)
    tracemalloc.start()
    try:
        cache.save(path)
        assert tracemalloc.get_traced_memory()[1] < cache.page(0).nbytes
    finally:
        tracemalloc.stop()


def test_a_file_has_no_more_than_its_pages(path: Path) -> None:
    cache = mixed()
    cache.save(path)
    assert path.stat().st_size < cache.nbytes + 64 * len(cache) + 6000


def test_a_cache_in_use_is_not_saved(path: Path) -> None:
    cache = mixed()
    step = Use("step")
    cache.begin(step, Access.READ_WRITE)
    for save in (cache.save, cache.to_proto, lambda p: checkpoint.save(p, {"c": cache})):
        with pytest.raises(errors.BindingInUse):
            save(path) if save != cache.to_proto else save()
    assert not path.exists()


# -- reading into storage that is there


def test_a_mapped_cache_takes_no_memory_and_never_writes_the_file(path: Path) -> None:
    cache = PagedCache((2, 8, 256, 128), np.float16)
    cache.allocate_pages(8, "FLOAT16")
    cache.save(path)
    data = path.read_bytes()
    tracemalloc.start()
    try:
        again = PagedCache.load(path, map=True)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    again.write(3, np.ones((2, 8, 5, 128), np.float16), 0)
    assert (again.page(3).decode()[:, :, :5] == 1).all() and path.read_bytes() == data
    again.convert(3, "INT8")
    path.unlink()
    assert not again.page(5).decode().any()


def test_mapped_pages_are_not_kept_for_others(path: Path) -> None:
    mixed().save(path)
    page_memory.shared.trim()
    cache = PagedCache.load(path, map=True)
    cache.clear()
    assert page_memory.shared.kept == 0


def test_pages_go_into_a_pool_with_holes_under_other_ids(path: Path) -> None:
    """Case 85."""
    saved = mixed()
    saved.save(path)
    pool = PagedCache(DIMS, np.float16)
    pool.allocate_pages(5, "FLOAT32")
    for page in (1, 3):
        pool.free(page)
    others = {p: pool.page(p).address for p in (0, 2, 4)}
    ids = pool.insert(path)
    assert list(ids) == list(saved) and list(ids.values())[:3] == [1, 3, 5]
    for old, new in ids.items():
        assert pool.store.state(new) == saved.store.state(old)
    assert {p: pool.page(p).address for p in others} == others


@pytest.mark.parametrize(
    "pool",
    [
        PagedCache((2, 2, 32, 32), np.float16),
        PagedCache(DIMS, np.float32),
        PagedCache(DIMS, np.float16, [formats.FLOAT16]),
    ],
    ids=["dims", "element type", "formats"],
)
def test_pages_of_another_kind_are_refused_by_a_pool(path: Path, pool: PagedCache) -> None:
    mixed().save(path)
    before = pool.snapshot()
    for use in (pool.insert, lambda p: checkpoint.restore(p, {"cache": pool})):
        with pytest.raises(errors.SavedStateError):
            use(path)
    assert pool.snapshot() == before


def test_a_pool_without_room_is_as_it_was(path: Path) -> None:
    mixed().save(path)
    pool = PagedCache(DIMS, np.float16, budget=50_000)
    pool.allocate_page("INT8")
    before = pool.snapshot()
    for use in (pool.insert, lambda p: checkpoint.restore(p, {"cache": pool})):
        with pytest.raises(errors.PageBudget):
            use(path)
    assert pool.snapshot() == before


class NoMemory(PageMemory):
    def _one(self, size: int, zeroed: bool) -> np.ndarray:
        raise MemoryError


def test_without_memory_nothing_is_restored(path: Path) -> None:
    checkpoint.save(path, {"cache": mixed(), "n": np.array([1, 2])})
    cache, n = PagedCache(DIMS, np.float16, memory=NoMemory()), np.zeros(2, np.int64)
    with pytest.raises(MemoryError):
        checkpoint.restore(path, {"n": n, "cache": cache})
    assert not n.any() and len(cache) == 0


def test_storage_gets_the_saved_state(path: Path) -> None:
    """Case 88: what was restored is compared, not believed."""
    saved = mixed()
    checkpoint.save(path, {"cache": saved, "n": np.array([[1.5, 2]])})
    cache, n = PagedCache(DIMS, np.float16), np.zeros((1, 2))
    cache.allocate_pages(20, "FLOAT32")
    checkpoint.restore(path, {"cache": cache, "n": n})
    assert cache.snapshot() == saved.snapshot() and n.tolist() == [[1.5, 2]]
    assert cache.nbytes == saved.nbytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": np.zeros(2), "m": np.zeros(2)},
        {"n": np.zeros(2, np.float32)},
        {"n": np.zeros(3)},
        {"n": np.zeros((2, 1))},
        {"n": PagedCache(DIMS, np.float16)},
        {"cache": np.zeros(2)},
        {"n": np.zeros(2), "cache": PagedCache(DIMS, np.float16, sparse_ids=True)},
    ],
    ids=lambda w: " ".join(w),
)
def test_a_state_of_something_else_changes_nothing(path: Path, wrong: dict[str, Any]) -> None:
    checkpoint.save(path, {"cache": mixed(), "n": np.ones(2)})
    with pytest.raises(errors.SavedStateError):
        checkpoint.restore(path, wrong)
    for value in wrong.values():
        assert not value.any() if isinstance(value, np.ndarray) else not len(value)


def test_read_only_arrays_are_not_restored(path: Path) -> None:
    checkpoint.save(path, {"n": np.ones(2)})
    n = np.zeros(2)
    n.flags.writeable = False
    with pytest.raises(errors.ImmutableStorage):
        checkpoint.restore(path, {"n": n})


def test_a_run_uses_the_state_that_was_restored_while_bound(path: Path) -> None:
    """Case 91: set, run, reset, run, set, run."""

    @model
    def step(
        cache: Mutable[Paged[FLOAT16[2, 2, 32, 64]]], total: Mutable[FLOAT[1]], x: FLOAT[1]
    ) -> tuple[FLOAT16[2, 2, 32, 64], Alias["cache"], Alias["total"]]:
        values = op.Expand(op.Cast(x, to=10), np.array([2, 2, 1, 64]))
        updated = kv.PagedCacheUpdate(cache, 0, values, 1, quantized_type="FLOAT16")
        return kv.PageGather(updated, 0), updated, kv.Assign(total, total + x)

    saved = PagedCache(DIMS, np.float16)
    saved.allocate_page("FLOAT32")
    saved.write(0, np.full((2, 2, 5, 64), 3, np.float16), 0)
    checkpoint.save(path, {"cache": saved, "total": np.array([40], np.float32)})
    cache, total = PagedCache(DIMS, np.float16), np.zeros(1, np.float32)
    with Session(step).bind(cache=cache, total=total) as bound:
        for _ in range(2):
            checkpoint.restore(path, {"cache": cache, "total": total})
            read, *_ = bound.run(x=np.array([2], np.float32))
            assert read[0, 0, :5, 0].tolist() == [3, 2, 3, 3, 3] and total[0] == 42
            assert cache.page(0).quantized_type == "FLOAT32"
            cache.clear()
            total[:] = 0
            read, *_ = bound.run(x=np.array([2], np.float32))
            assert read[0, 0, :5, 0].tolist() == [0, 2, 0, 0, 0] and total[0] == 2
