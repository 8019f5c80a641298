"""Every entry of the reduction table against NumPy, and the halves against exact references."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_cases import BF16, BOOL, COMPLEX, DTYPES, F16, F32, F64, HALVES, INTS, TABLE, has

from pycollective._core import combine_arrays, convert_halves, reduce_arrays

UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "mean": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
REFUSED = [(dtype, op) for dtype in DTYPES for op in UFUNCS if not has(dtype, op)]
# Around vectors of 16 to 64 bytes, a prime, and more than one block.
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 97, 1009, 8191, 20_011]

in_table = pytest.mark.parametrize(("dtype", "op"), TABLE, ids=lambda v: str(v))


def values(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return ints of random bits, or floats of all sizes with zeros, infinities and NaNs."""
    random = np.random.default_rng(seed)
    if dtype == BOOL:
        return random.integers(0, 2, shape).astype(bool)
    if dtype in INTS:
        memory = random.integers(0, 256, (*shape, dtype.itemsize), dtype="uint8")
        return memory.view(dtype).reshape(shape)
    if dtype in COMPLEX:
        parts = random.standard_normal((2, *shape))
        return (parts[0] + 1j * parts[1]).astype(dtype)
    out = random.standard_normal(shape) * np.exp2(random.integers(-30, 16, shape))
    special = random.integers(0, 40, shape)
    for k, v in enumerate((0.0, -0.0, np.inf, -np.inf, np.nan)):
        out[special == k] = v
    with np.errstate(all="ignore"):
        return out.astype(dtype)


def toward_zero(total: np.ndarray, size: int) -> np.ndarray:
    """Divide ints as C does, without leaving their type."""
    whole = [abs(int(v)) // size * (1 if v >= 0 else -1) for v in total.ravel()]
    return np.array(whole, dtype=total.dtype).reshape(total.shape)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply complex numbers with a rounding after every operation; NumPy's may contract some."""
    out = np.empty_like(a)
    out.real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    return out


def reference(op: str, sources: list[np.ndarray], size: int = 0) -> np.ndarray:
    """Combine in rank order; halves in float32, rounded at the end."""
    dtype = sources[0].dtype
    combine = product if dtype in COMPLEX and op == "prod" else UFUNCS[op]
    with np.errstate(all="ignore"):
        total = sources[0].astype("float32") if dtype in HALVES else sources[0].copy()
        for source in sources[1:]:
            total = combine(total, source.astype(total.dtype))
        if op == "mean" and size:
            if dtype in INTS:
                total = toward_zero(total, size)
            else:
                parts = total.view(total.real.dtype)
                parts /= parts.dtype.type(size)
        return total.astype(dtype)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    if got.dtype in HALVES:
        got, want = got.astype("float32"), want.astype("float32")
    np.testing.assert_array_equal(got, want)


@in_table
@pytest.mark.parametrize("shift", [0, 1])
def test_combine_arrays_of_any_size_and_alignment_is_right(dtype, op, shift):
    """Sizes near those of vectors, aligned or not; nothing beyond the output is written."""
    for n in SIZES:
        a, b = values(dtype, (2, n + shift), n)
        a, b = a[shift:], b[shift:]
        memory = np.full(n + shift + 1, 1, dtype)
        combine_arrays(op, a, b, memory[shift : shift + n])
        assert_same(memory[shift : shift + n], reference(op, [a, b]))
        assert memory[-1] == 1 and (shift == 0 or memory[0] == 1)


@in_table
def test_combine_in_place_is_right(dtype, op):
    n = 5003
    x = values(dtype, (4, n), 1)
    want = reference(op, [x[0], x[1]])
    for place in (0, 1):
        mine = x.copy()
        combine_arrays(op, mine[0], mine[1], mine[place])
        assert_same(mine[place], want)
    itself = x[2].copy()
    combine_arrays(op, itself, itself, itself)
    assert_same(itself, reference(op, [x[2], x[2]]))
    want = reference(op, list(x), 4)
    for place in range(4):
        mine = x.copy()
        reduce_arrays(op, list(mine), [mine[place]], 4)
        assert_same(mine[place], want)
    mine = x.copy()
    reduce_arrays(op, list(mine), list(mine), 4)
    for out in mine:
        assert_same(out, want)


@in_table
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_combine_of_many_sources_and_targets_is_right(dtype, op, ranks):
    for n in (0, 1, 97, 10_007):
        x = values(dtype, (ranks, n), n + ranks)
        before = x.tobytes()
        for size in (0, ranks):
            outs = [np.zeros(n, dtype) for _ in range(3)]
            reduce_arrays(op, list(x), outs, size)
            want = reference(op, list(x), size)
            for out in outs:
                assert_same(out, want)
        assert x.tobytes() == before


def test_combine_rounds_halves_of_many_sources_once():
    """Sixteen additions of 2^-11 to 1 are lost step by step in float16, but not in float32."""
    for dtype, little in ((F16, 2.0**-11), (BF16, 2.0**-8)):
        sources = [np.array([1.0], dtype)] + [np.array([little], dtype)] * 16
        out = np.zeros(1, dtype)
        reduce_arrays("sum", sources, [out])
        assert float(out[0]) == 1.0 + 16 * little
        step = sources[0].copy()
        for source in sources[1:]:
            combine_arrays("sum", step, source, step)
        assert float(step[0]) == 1.0
        top = np.array([60000.0], F16)
        reduce_arrays("mean", [top] * 4, [top], 4)
        assert float(top[0]) == 60000.0


# Conversions --------------------------------------------------------------------------------------


def all_patterns(dtype: np.dtype) -> np.ndarray:
    return np.arange(65536, dtype="uint16").view(dtype)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_of_every_bit_pattern_are_widened(dtype, portable):
    x = all_patterns(dtype)
    got = np.zeros(65536, "float32")
    convert_halves(x, got, portable)
    with np.errstate(invalid="ignore"):
        want = x.astype("float32")
    nan = np.isnan(want)
    assert nan.sum() == (2046 if dtype == F16 else 254)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(np.signbit(got), x.view("uint16") >= 0x8000)
    np.testing.assert_array_equal(got.view("uint32")[~nan], want.view("uint32")[~nan])


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_of_every_bit_pattern_are_rounded_to_even(dtype, portable):
    """Round all numbers, the midpoints between neighbours, and the values next to the midpoints."""
    top = 0x7C00 if dtype == F16 else 0x7F80  # infinity
    exact = np.arange(top + 1, dtype="uint16").view(dtype).astype("float64")
    exact[-1] = 65536.0 if dtype == F16 else 2.0**128  # the next number, if there were one
    with np.errstate(over="ignore"):
        middle = ((exact[1:] + exact[:-1]) / 2).astype("float32")
    even = np.arange(top, dtype="uint16")
    even += even & 1
    below = np.arange(top, dtype="uint16")
    below_middle, above_middle = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.inf)
    cases = [
        (exact[:-1].astype("float32"), below),
        (middle, even),
        (below_middle.astype("float32"), below),
        (above_middle.astype("float32"), below + np.uint16(1)),
        (np.array([np.inf, 3.4e38], "float32"), np.array([top, top], "uint16")),
    ]
    for x, want in cases:
        for sign, bit in ((1, 0), (-1, 0x8000)):
            got = np.zeros(x.size, dtype)
            convert_halves(x * np.float32(sign), got, portable)
            np.testing.assert_array_equal(got.view("uint16"), want | np.uint16(bit))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_keep_nan_with_its_sign(dtype, portable):
    bits = np.array(
        [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F801000, 0xFF800001, 0xFFFFFFFF], "uint32"
    )
    got = np.zeros(bits.size, dtype)
    convert_halves(bits.view("float32"), got, portable)
    assert np.isnan(got.astype("float32")).all()
    np.testing.assert_array_equal(got.view("uint16") >> 15, bits >> 31)


@settings(max_examples=200, deadline=None)
@given(hnp.arrays("uint32", st.integers(1, 70), elements=st.integers(0, 2**32 - 1)))
def test_float32_is_narrowed_as_by_numpy_and_ml_dtypes(bits):
    x = bits.view("float32")
    for dtype in HALVES:
        for portable in (False, True):
            got = np.zeros(x.size, dtype)
            convert_halves(x, got, portable)
            with np.errstate(all="ignore"):
                want = x.astype(dtype)
            nan = np.isnan(x)
            np.testing.assert_array_equal(np.isnan(got.astype("float32")), nan)
            np.testing.assert_array_equal(got.view("uint16")[~nan], want.view("uint16")[~nan])


# Rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_combine_wraps_ints(dtype):
    top, bottom = np.iinfo(dtype).max, np.iinfo(dtype).min
    x = np.array([top, top, bottom, 7], dtype)
    y = np.array([1, top, bottom, 0], dtype)
    out = np.zeros(4, dtype)
    combine_arrays("sum", x, y, out)
    wrapped = 2 ** (8 * dtype.itemsize)
    want = [(int(a) + int(b) - bottom) % wrapped + bottom for a, b in zip(x, y, strict=True)]
    assert out.tolist() == want
    combine_arrays("prod", x, y, out)
    assert out.tolist() == [
        (int(a) * int(b) - bottom) % wrapped + bottom for a, b in zip(x, y, strict=True)
    ]


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_mean_of_any_int_and_size_is_right(dtype):
    """Every int of 8 and 16 bits, the ends of wider ranges, and more ranks than the type counts."""
    info = np.iinfo(dtype)
    if dtype.itemsize <= 2:
        x = np.arange(info.min, info.max + 1).astype(dtype)
    else:
        near = np.arange(-300, 300)
        x = np.concatenate([(np.array(m, dtype) + near.astype(dtype)) for m in
                            (0, info.min, info.max, info.max // 2, info.max // 3)])  # fmt: skip
    out = np.zeros_like(x)
    for size in (1, 2, 3, 7, 10, 127, 128, 255, 256, 300, 4096, 65537, 2**31 - 1):
        reduce_arrays("mean", [x], [out], size)
        absolute = np.where(x < 0, np.uint64(0) - x.astype("uint64"), x.astype("uint64"))
        quotient = (absolute // np.uint64(size)).astype("uint64")
        want = np.where(x < 0, np.uint64(0) - quotient, quotient).astype(dtype)
        np.testing.assert_array_equal(out, want, err_msg=str(size))


@pytest.mark.parametrize("dtype", [*HALVES, F32, F64], ids=str)
@pytest.mark.parametrize("op", ["min", "max"])
def test_combine_min_and_max_of_nan_give_nan(dtype, op):
    x = np.array([np.nan, 1.0, np.nan, np.inf] * 9, dtype)
    y = np.array([2.0, np.nan, np.nan, -np.inf] * 9, dtype)
    out = np.zeros(36, dtype)
    combine_arrays(op, x, y, out)
    number = np.inf if op == "max" else -np.inf
    np.testing.assert_array_equal(out.astype("float32"), [np.nan, np.nan, np.nan, number] * 9)
    reduce_arrays(op, [y, y, x, y], [out])
    np.testing.assert_array_equal(out.astype("float32"), [np.nan, np.nan, np.nan, number] * 9)


def test_combine_of_bools_takes_any_other_byte_than_0_as_true():
    a = np.array([0, 1, 2, 255, 2, 0], "uint8").view(bool)
    b = np.array([0, 0, 4, 2, 0, 128], "uint8").view(bool)
    for op, want in {
        "and": [0, 0, 1, 1, 0, 0], "min": [0, 0, 1, 1, 0, 0],
        "or": [0, 1, 1, 1, 1, 1], "max": [0, 1, 1, 1, 1, 1], "xor": [0, 1, 0, 0, 1, 1],
    }.items():  # fmt: skip
        out = np.zeros(6, bool)
        combine_arrays(op, a, b, out)
        assert out.view("uint8").tolist() == want


@pytest.mark.parametrize(("dtype", "op"), REFUSED, ids=lambda v: str(v))
def test_combine_op_that_the_dtype_lacks_raises_type_error(dtype, op):
    x = np.ones(3, dtype)
    with pytest.raises(TypeError, match=f"there is no '{op}' of {dtype} arrays: ") as refused:
        reduce_arrays(op, [x, x], [x.copy()])
    remedy = {"b": "astype|'or'", "c": "absolute values|ints and bools"}.get(dtype.kind, "view")
    assert refused.match(remedy)


@pytest.mark.parametrize(
    "dtype", [">f4", ">i2", "longdouble", "M8[s]", "m8[s]", "V2", "S2", "U1",
              [("a", "f4")], ml_dtypes.float8_e4m3fn, ml_dtypes.int4], ids=str
)  # fmt: skip
def test_combine_of_an_unsupported_dtype_raises_type_error(dtype):
    x = np.zeros(3, dtype)
    with pytest.raises(TypeError) as refused:
        reduce_arrays("max", [x], [x])
    assert f"no reduction for dtype {x.dtype};" in str(refused.value)
    assert all(str(d) in str(refused.value) for d in DTYPES)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_reduce_arrays_equals_the_reference(data):
    """Any number of sources of any values, each a view at any offset."""
    dtype, op = data.draw(st.sampled_from(TABLE))
    ranks, n = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 70))
    shift = data.draw(st.integers(0, 3))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    if dtype.kind in "fV" or dtype in COMPLEX:
        x = values(dtype, (ranks, n + shift), int(random.integers(2**32)))
    else:
        memory = random.integers(0, 256, (ranks, n + shift, dtype.itemsize), dtype="uint8")
        x = (memory % 2 if dtype == BOOL else memory).view(dtype)[..., 0]
    size = data.draw(st.sampled_from([0, ranks, 300]))
    sources = [row[shift:] for row in x]
    outs = [np.zeros(n, dtype) for _ in range(data.draw(st.integers(1, 3)))]
    reduce_arrays(op, sources, outs, size)
    for out in outs:
        assert_same(out, reference(op, sources, size))
