"""Compiles CUDA's kernels with a function of scores inside, each when it is first launched.

That happens once for all processes: code is kept in the folder of :mod:`.function_cache`, under a digest of
all that it depends on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib

from ..build import library, sources
from ..terminal import waiting
from . import compiler, function_cache, nvrtc
from .cuda_source import Headers, headers_of, most_dims
from .operations import STANDARD
from .source import kinds_of
from .statements import Function

__all__ = ["load"]

_SIMT = ("forward", "backward", "mask_gradient", "captured_gradient", "score_matrix", "row_statistics")
#: The kernels that may have a function inside.
_KERNELS = (
    *(f"simt/{name}" for name in _SIMT),
    "sm80/sm80_forward",
    "sm80/weights",
    *(f"sm80/backward/sm80_{name}" for name in ("gradients", "mask_gradient")),
)

#: Products and sums stay apart (no fused multiply-add, unless it is written as one), so that a score has the
#: same bits in all kernels. All functions are the device's.
_OPTIONS = (
    "--std=c++17",
    "--fmad=false",
    "--device-as-default-execution-space",
    "--define-macro=SELFATTN_FUNCTION",
)

_loaded: set[str] = set()


def load(function: Function) -> str:
    """The name by which the operators know a function on CUDA tensors. Nothing is compiled yet.

    Raises:
        CompilerError: nothing can be compiled here.
        UnsupportedFunctionError: the function is too large.
    """
    headers = headers_of(function)
    key = _key(headers)
    if key not in _loaded:
        library.extension().load_cuda_score_function(
            name=key,
            score_bytes=function.dtype.itemsize,
            tensors=kinds_of(function),
            dims=most_dims(function),
            numbers=len(function.numbers),
            make_code=functools.partial(_code_of, headers, key),
        )
        _loaded.add(key)
    return key


@functools.lru_cache(maxsize=256)
def _key(headers: Headers) -> str:
    digest = hashlib.sha256(_surroundings())
    for text in headers:
        digest.update(text.encode())
    return digest.hexdigest()[: compiler.KEY_LENGTH]


@functools.cache
def _surroundings() -> bytes:
    """A digest of all that the code of a function depends on besides the function."""
    try:
        parts = [nvrtc.version(), *_OPTIONS, _TEXT, *_standard_headers().values()]
    except nvrtc.NvrtcError as error:
        raise compiler.CompilerError(str(error)) from error
    root = sources.root()
    files = sorted(path for folder in ("core", "cuda") for path in (root / folder).rglob("*.*h"))
    return hashlib.sha256("\n".join(parts).encode() + b"".join(file.read_bytes() for file in files)).digest()


def _code_of(headers: Headers, key: str, kernel: str, capability: int) -> list[bytes]:
    """The code of a kernel, best first, which C++ asks for when the kernel is first launched."""
    of_kernel = hashlib.sha256(f"{kernel} {capability}".encode()).hexdigest()[: compiler.KEY_LENGTH]
    names = [f"{key}-{of_kernel}.{kind}" for kind in ("cubin", "ptx")]
    code = [kept for kept in map(function_cache.read, names) if kept is not None]
    if len(code) < len(names):
        own = {"selfattn_function_arguments.h": headers.arguments, "selfattn_function.h": headers.function}
        options = [*_OPTIONS, f"--include-path={sources.root()}"]
        with waiting(
            "selfattn_ext: compiling a CUDA kernel with a function of scores, once for all processes"
        ):
            headers_in_text = {**_standard_headers(), **own}
            code = [*nvrtc.compile_kernel(_TEXT, kernel, capability, headers_in_text, options)]
        with contextlib.suppress(OSError):  # another process then compiles it again
            for name, content in zip(names, code, strict=True):
                function_cache.write(name, content)
    return [content for content in code if content]


_TEXT = "\n".join(
    [
        "// NVRTC has no such function of compilers.",
        "#define __builtin_huge_val() __builtin_bit_cast(double, 0x7ff0000000000000ull)",
        *(f'#include "cuda/{name}.cuh"' for name in _KERNELS),
    ]
)


@functools.cache
def _standard_headers() -> dict[str, str]:
    """The parts of the standard library that kernels and functions use, as NVRTC has none."""
    others = ("exp", "tanh", "fabs", "floor", "ceil", "trunc", "nearbyint")
    of_one = (*sorted(STANDARD - {"atan2", "hypot", "copysign"}), *others)
    of_two = ("atan2", "hypot", "copysign", "fmod", "pow")
    functions = [
        f"inline float {name}(float x) {{ return ::{name}f(x); }}\n"
        f"inline double {name}(double x) {{ return ::{name}(x); }}"
        for name in of_one
    ]
    functions += [
        f"inline float {name}(float x, float y) {{ return ::{name}f(x, y); }}\n"
        f"inline double {name}(double x, double y) {{ return ::{name}(x, y); }}"
        for name in of_two
    ]
    texts = dict(_HEADERS)
    texts["cmath"] = "namespace std {\n" + "\n".join(functions) + "\n}\n"
    return {name: f"#pragma once\n{text}" for name, text in texts.items()}


_HEADERS = {
    "cstddef": "using size_t = decltype(sizeof(0));\n",
    "cstdint": """
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;
#define INT64_MAX 0x7fffffffffffffffL
""",
    "cstring": "namespace std {\nusing ::memcpy;\n}\n",
    "algorithm": """
namespace std {
template <class T>
constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }
template <class T>
constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
}
""",
    "initializer_list": """
namespace std {
template <class T>
class initializer_list {
 public:
  constexpr const T* begin() const { return first; }
  constexpr const T* end() const { return first + count; }
 private:
  const T* first;
  unsigned long count;
};
}
""",
    "limits": """
namespace std {
template <class T>
struct numeric_limits {
  static constexpr T infinity() { return static_cast<T>(__builtin_huge_val()); }
  static constexpr T quiet_NaN() {
    return static_cast<T>(__builtin_bit_cast(double, 0x7ff8000000000000ull));
  }
};
}
""",
    "type_traits": """
namespace std {
template <bool kFirst, class A, class B>
struct conditional { using type = A; };
template <class A, class B>
struct conditional<false, A, B> { using type = B; };
template <bool kFirst, class A, class B>
using conditional_t = typename conditional<kFirst, A, B>::type;
template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;
template <class T>
inline constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, double>;
template <class T>
inline constexpr bool is_signed_v = T(-1) < T(0);
template <class T>
inline constexpr bool is_unsigned_v = !is_signed_v<T>;
}
""",
}
