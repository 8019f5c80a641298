// Neural-network kernels: every array is checked here, before a kernel runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/interpreter_release.h"
#include "nn/kernels.h"
#include "nn/parallel.h"
#include "nn/processor.h"

namespace pycollective {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;
using nn::Index;
using nn::Window;
using Array = py::array;
using MaybeArray = std::optional<py::array>;

std::string shape_text(const Array& a) { return py::str(a.attr("shape")).cast<std::string>(); }

template <typename T>
void check(const Array& a, const char* name, Index size, bool writeable) {
  if (!py::isinstance<py::array_t<T>>(a)) {
    throw py::value_error(std::string(name) + " has dtype " +
                          py::str(a.dtype()).cast<std::string>() + ", expected " +
                          py::str(py::dtype::of<T>()).cast<std::string>());
  }
  if (!(a.flags() & py::array::c_style)) {
    throw py::value_error(std::string(name) + " of shape " + shape_text(a) +
                          " is not contiguous in C order");
  }
  if (a.size() != size) {
    throw py::value_error(std::string(name) + " has shape " + shape_text(a) + ", which is " +
                          std::to_string(a.size()) + " elements; expected " + std::to_string(size));
  }
  if (writeable && !a.writeable()) {
    throw py::value_error(std::string(name) + " of shape " + shape_text(a) + " is read-only");
  }
}

template <typename T>
const T* in(const Array& a, const char* name, Index size) {
  check<T>(a, name, size, false);
  return static_cast<const T*>(a.data());
}

template <typename T>
const T* in(const MaybeArray& a, const char* name, Index size) {
  return a ? in<T>(*a, name, size) : nullptr;
}

template <typename T>
T* out(Array& a, const char* name, Index size) {
  check<T>(a, name, size, true);
  return static_cast<T*>(a.mutable_data());
}

template <typename T>
T* out(MaybeArray& a, const char* name, Index size) {
  return a ? out<T>(*a, name, size) : nullptr;
}

// Calls `body` with a value of the array's element type.
template <typename Body>
void with_real(const Array& a, const char* name, Body body) {
  if (py::isinstance<py::array_t<float>>(a)) {
    body(float{});
  } else if (py::isinstance<py::array_t<double>>(a)) {
    body(double{});
  } else {
    throw py::value_error(std::string(name) + " has dtype " +
                          py::str(a.dtype()).cast<std::string>() +
                          "; the compiled kernels take float32 and float64");
  }
}

template <typename Body>
void with_code(const Array& a, Body body) {
  if (py::isinstance<py::array_t<std::uint8_t>>(a)) {
    body(std::uint8_t{});
  } else {
    body(std::uint32_t{});
  }
}

// How many times `unit` goes into the array.
Index count(const Array& a, const char* name, Index unit) {
  if (a.size() % unit != 0) {
    throw py::value_error(std::string(name) + " of shape " + shape_text(a) +
                          " is not a whole number of blocks of " + std::to_string(unit) +
                          " elements");
  }
  return a.size() / unit;
}

// The product of two sizes that must describe an array in memory.
Index area(Index a, Index b) {
  Index product;
  if (__builtin_mul_overflow(a, b, &product)) throw py::value_error("sizes overflow");
  return product;
}

Index check_rows(const Array& x, const Window& w, Index first, Index rows) {
  const Index images = count(x, "x", w.image());
  if (first < 0 || rows < 0 || rows > images * w.out_h - first) {
    throw py::value_error("rows " + std::to_string(first) + " to " + std::to_string(first + rows) +
                          " are not among the " + std::to_string(images * w.out_h) +
                          " output rows");
  }
  return images;
}

void check_pool(const Window& pool, Index taps) {
  if (pool.dilation_h != 1 || pool.dilation_w != 1) {
    throw py::value_error("pooling windows must have dilation 1");
  }
  if (pool.taps() > taps) {
    throw py::value_error("a pooling window of " + std::to_string(pool.taps()) +
                          " taps does not fit the type of the codes");
  }
}

// Codes come from outside too: one beyond the window would send a gradient out of the image.
template <typename Code>
void check_codes(const Code* codes, Index size, const Window& pool) {
  const bool good = nn::codes_fit(codes, size, static_cast<Code>(pool.taps()));
  if (!good) throw py::value_error("codes name a tap outside the pooling window");
}

// A pooling window over the convolution's output, in disjoint strips of rows.
void check_fused(const Window& w, const Window& pool, Index filters) {
  check_pool(pool, nn::kNone<std::uint8_t>);
  if (pool.height != w.out_h || pool.width != w.out_w || pool.channels != filters ||
      pool.pad_top != 0 || pool.pad_left != 0 || pool.stride_h < pool.kernel_h ||
      pool.stride_w < pool.kernel_w || (pool.out_h - 1) * pool.stride_h + pool.kernel_h > w.out_h ||
      (pool.out_w - 1) * pool.stride_w + pool.kernel_w > w.out_w) {
    throw py::value_error(
        "a fused pooling window must lie over the convolution's output without padding or overlap");
  }
}

// So many numbers are gone through once in less time than getting the interpreter's lock back may
// take.
constexpr Index kBrief = 1 << 16;

void im2col(const Array& x, Array& cols, const Window& w, Index first, Index rows) {
  check_rows(x, w, first, rows);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    T* to = out<T>(cols, "cols", area(rows * w.out_w, w.patch()));
    InterpreterRelease release;
    nn::im2col(from, to, w, first, rows);
  });
}

void col2im(const Array& cols, Array& x, const Window& w, Index first, Index rows) {
  check_rows(x, w, first, rows);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(cols, "cols", area(rows * w.out_w, w.patch()));
    T* to = out<T>(x, "x", x.size());
    InterpreterRelease release;
    nn::col2im(from, to, w, first, rows);
  });
}

void bias_relu(Array& z, const MaybeArray& bias, bool relu) {
  with_real(z, "z", [&](auto zero) {
    using T = decltype(zero);
    const Index channels = bias ? std::max<Index>(bias->size(), 1) : 1;
    const Index rows = count(z, "z", channels);
    T* to = out<T>(z, "z", z.size());
    const T* b = in<T>(bias, "bias", channels);
    InterpreterRelease release;
    nn::bias_relu(to, b, rows, channels, relu);
  });
}

// Calls body(first, last) for parts of `size` numbers; few are not worth waking other threads.
template <typename Body>
void by_parts(Index size, const Body& body) {
  constexpr Index kLeast = 1 << 15;
  const int parts = static_cast<int>(std::clamp<Index>(size / kLeast, 1, nn::threads()));
  nn::in_parallel(parts, [&](int part) {
    body(nn::begin_of_part(size, part, parts), nn::begin_of_part(size, part + 1, parts));
  });
}

double sum_of_squares(const Array& x) {
  double result = 0;
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    InterpreterRelease release(x.size() <= kBrief);
    result = nn::sum_of_squares(from, x.size());
  });
  return result;
}

void add_multiple(const Array& x, double factor, const Array& y, Array& z) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* multiplied = in<T>(x, "x", x.size());
    const T* added = in<T>(y, "y", x.size());
    T* to = out<T>(z, "z", x.size());
    InterpreterRelease release(x.size() <= kBrief);
    by_parts(x.size(), [&](Index first, Index last) {
      nn::add_multiple(multiplied + first, factor, added + first, to + first, last - first);
    });
  });
}

void relu(const Array& x, Array& y) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    T* to = out<T>(y, "y", x.size());
    InterpreterRelease release;
    by_parts(x.size(),
             [&](Index first, Index last) { nn::relu(from + first, to + first, last - first); });
  });
}

void add_relu(const Array& x, const Array& y, Array& z) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* one = in<T>(x, "x", x.size());
    const T* other = in<T>(y, "y", x.size());
    T* to = out<T>(z, "z", x.size());
    InterpreterRelease release;
    by_parts(x.size(), [&](Index first, Index last) {
      nn::add_relu(one + first, other + first, to + first, last - first);
    });
  });
}

void relu_gradient(const Array& g, const MaybeArray& y, MaybeArray dz, MaybeArray bias_gradient) {
  with_real(g, "g", [&](auto zero) {
    using T = decltype(zero);
    const Index channels = bias_gradient ? std::max<Index>(bias_gradient->size(), 1) : 1;
    const Index rows = count(g, "g", channels);
    const T* from = in<T>(g, "g", g.size());
    const T* mask = in<T>(y, "y", g.size());
    T* to = out<T>(dz, "dz", g.size());
    T* sums = out<T>(bias_gradient, "bias_gradient", channels);
    InterpreterRelease release;
    if (sums || !to) {
      nn::relu_gradient(from, mask, to, sums, rows, channels);
      return;
    }
    by_parts(g.size(), [&](Index first, Index last) {
      nn::relu_gradient(from + first, mask ? mask + first : nullptr, to + first,
                        static_cast<T*>(nullptr), last - first, 1);
    });
  });
}

void softmax_cross_entropy(const Array& logits, const Array& labels, Array& losses,
                           MaybeArray gradient) {
  if (logits.ndim() != 2 || logits.shape(1) < 1) {
    throw py::value_error("logits must be [rows, classes], not " + shape_text(logits));
  }
  const Index rows = logits.shape(0), classes = logits.shape(1);
  const Index* label = in<Index>(labels, "labels", rows);
  for (Index r = 0; r < rows; ++r) {
    if (label[r] < 0 || label[r] >= classes) {
      throw py::value_error("labels must be in 0 to " + std::to_string(classes - 1) +
                            " for logits of shape " + shape_text(logits) + ", got " +
                            std::to_string(label[r]) + " in row " + std::to_string(r));
    }
  }
  with_real(logits, "logits", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(logits, "logits", logits.size());
    T* loss = out<T>(losses, "losses", rows);
    T* slope = out<T>(gradient, "gradient", logits.size());
    InterpreterRelease release(logits.size() <= kBrief / 16);
    nn::softmax_cross_entropy(from, label, loss, slope, rows, classes);
  });
}

void max_pool(const Array& x, const MaybeArray& bias, Array& y, Array& codes, const Window& w,
              bool relu) {
  const Index images = count(x, "x", w.image());
  const Index size = images * w.out_h * w.out_w * w.channels;
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* b = in<T>(bias, "bias", w.channels);
    T* to = out<T>(y, "y", size);
    with_code(codes, [&](auto code) {
      using Code = decltype(code);
      check_pool(w, nn::kNone<Code>);
      Code* tap = out<Code>(codes, "codes", size);
      InterpreterRelease release;
      nn::max_pool(from, b, to, tap, w, images, relu);
    });
  });
}

void max_pool_gradient(const Array& g, const Array& codes, Array& dx, MaybeArray bias_gradient,
                       const Window& w) {
  const Index images = count(dx, "dx", w.image());
  const Index size = images * w.out_h * w.out_w * w.channels;
  with_real(g, "g", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(g, "g", size);
    T* to = out<T>(dx, "dx", dx.size());
    T* sums = out<T>(bias_gradient, "bias_gradient", w.channels);
    with_code(codes, [&](auto code) {
      using Code = decltype(code);
      check_pool(w, nn::kNone<Code>);
      const Code* tap = in<Code>(codes, "codes", size);
      InterpreterRelease release;
      check_codes(tap, size, w);
      nn::max_pool_gradient(from, tap, to, sums, w, images);
    });
  });
}

void direct_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                    MaybeArray codes, const Window& w, const std::optional<Window>& pool,
                    bool relu) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  if (pool) check_fused(w, *pool, filters);
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const nn::DirectForward<T> a{in<T>(x, "x", x.size()),
                                 in<T>(weights, "weights", weights.size()),
                                 in<T>(bias, "bias", filters),
                                 out<T>(y, "y", size),
                                 out<std::uint8_t>(codes, "codes", size),
                                 w,
                                 pool ? &*pool : nullptr,
                                 images,
                                 filters,
                                 relu};
    InterpreterRelease release;
    nn::direct_forward(a);
  });
}

void direct_gradient(const Array& x, const Array& g, const MaybeArray& y, const MaybeArray& codes,
                     Array& weight_gradient, MaybeArray bias_gradient, const Window& w,
                     const std::optional<Window>& pool) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weight_gradient, "weight_gradient", w.patch());
  if (filters < 1) throw py::value_error("weight_gradient holds no filter");
  if (pool) check_fused(w, *pool, filters);
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const std::uint8_t* tap = in<std::uint8_t>(codes, "codes", size);
    const nn::DirectGradient<T> a{
        in<T>(x, "x", x.size()),
        in<T>(g, "g", size),
        in<T>(y, "y", size),
        tap,
        out<T>(weight_gradient, "weight_gradient", weight_gradient.size()),
        out<T>(bias_gradient, "bias_gradient", filters),
        w,
        pool ? &*pool : nullptr,
        images,
        filters};
    InterpreterRelease release;
    if (tap) check_codes(tap, size, *pool);
    nn::direct_gradient(a);
  });
}

void check_winograd(const Window& w) {
  if (w.kernel_h != 3 || w.kernel_w != 3 || w.stride_h != 1 || w.stride_w != 1 ||
      w.dilation_h != 1 || w.dilation_w != 1) {
    throw py::value_error("the window must be 3 x 3 with stride and dilation 1");
  }
}

void winograd_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                      MaybeArray codes, const Window& w, const std::optional<Window>& pool,
                      bool relu) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  check_winograd(w);
  if (pool) {
    check_fused(w, *pool, filters);
    if (pool->kernel_h != 2 || pool->kernel_w != 2 || pool->stride_h != 2 || pool->stride_w != 2) {
      throw py::value_error("the pooling window must be 2 x 2 with stride 2");
    }
    if (!relu) throw py::value_error("pooling goes with relu");
  }
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  const nn::DirectForward<float> a{in<float>(x, "x", x.size()),
                                   in<float>(weights, "weights", weights.size()),
                                   in<float>(bias, "bias", filters),
                                   out<float>(y, "y", size),
                                   out<std::uint8_t>(codes, "codes", size),
                                   w,
                                   pool ? &*pool : nullptr,
                                   images,
                                   filters,
                                   relu};
  InterpreterRelease release;
  nn::winograd_forward(a);
}

void winograd_gradient(const Array& x, const Array& weights, const Array& g, const MaybeArray& y,
                       MaybeArray x_gradient, MaybeArray weight_gradient, MaybeArray bias_gradient,
                       const Window& w) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  check_winograd(w);
  const Index size = area(images * w.out_h * w.out_w, filters);
  const nn::WinogradGradient a{in<float>(x, "x", x.size()),
                               in<float>(weights, "weights", weights.size()),
                               in<float>(g, "g", size),
                               in<float>(y, "y", size),
                               out<float>(x_gradient, "x_gradient", x.size()),
                               out<float>(weight_gradient, "weight_gradient", weights.size()),
                               out<float>(bias_gradient, "bias_gradient", filters),
                               w,
                               images,
                               filters};
  InterpreterRelease release;
  nn::winograd_gradient(a);
}

void sparse_gradient(const Array& x, const Array& weights, const Array& g, const Array& codes,
                     MaybeArray x_gradient, MaybeArray weight_gradient, MaybeArray bias_gradient,
                     const Window& w, const Window& pool) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  check_fused(w, pool, filters);
  if (!nn::sparse_fits(w, filters)) {
    throw py::value_error("images or weights are too large for the lists of places");
  }
  const Index size = area(images * pool.out_h * pool.out_w, filters);
  const std::uint8_t* tap = in<std::uint8_t>(codes, "codes", size);
  const nn::SparseGradient a{in<float>(x, "x", x.size()),
                             in<float>(weights, "weights", weights.size()),
                             in<float>(g, "g", size),
                             tap,
                             out<float>(x_gradient, "x_gradient", x.size()),
                             out<float>(weight_gradient, "weight_gradient", weights.size()),
                             out<float>(bias_gradient, "bias_gradient", filters),
                             w,
                             pool,
                             images,
                             filters};
  InterpreterRelease release;
  check_codes(tap, size, pool);
  nn::sparse_gradient(a);
}

// Pooling windows one below the other, which divide the rows into blocks.
void check_strips(const Window& w, const Window& pool, Index filters) {
  check_fused(w, pool, filters);
  if (pool.stride_h != pool.kernel_h || pool.out_h * pool.stride_h != w.out_h) {
    throw py::value_error("the pooling windows must cover the rows of the convolution's output");
  }
}

void blocked_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                     MaybeArray codes, const Window& w, const std::optional<Window>& pool,
                     bool relu) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  if (pool) check_strips(w, *pool, filters);
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  const nn::DirectForward<float> a{in<float>(x, "x", x.size()),
                                   in<float>(weights, "weights", weights.size()),
                                   in<float>(bias, "bias", filters),
                                   out<float>(y, "y", size),
                                   out<std::uint8_t>(codes, "codes", size),
                                   w,
                                   pool ? &*pool : nullptr,
                                   images,
                                   filters,
                                   relu};
  InterpreterRelease release;
  nn::blocked_forward(a);
}

void blocked_gradient(const Array& x, const Array& weights, const Array& g, const MaybeArray& y,
                      const MaybeArray& codes, MaybeArray x_gradient, MaybeArray weight_gradient,
                      MaybeArray bias_gradient, const Window& w,
                      const std::optional<Window>& pool) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  if (pool) check_strips(w, *pool, filters);
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  const std::uint8_t* tap = in<std::uint8_t>(codes, "codes", size);
  const nn::BlockedGradient a{in<float>(x, "x", x.size()),
                              in<float>(weights, "weights", weights.size()),
                              in<float>(g, "g", size),
                              in<float>(y, "y", size),
                              tap,
                              out<float>(x_gradient, "x_gradient", x.size()),
                              out<float>(weight_gradient, "weight_gradient", weights.size()),
                              out<float>(bias_gradient, "bias_gradient", filters),
                              w,
                              pool ? &*pool : nullptr,
                              images,
                              filters};
  InterpreterRelease release;
  if (tap) check_codes(tap, size, *pool);
  nn::blocked_gradient(a);
}

struct DenseSizes {
  Index rows, inputs, units;
};

DenseSizes check_dense(const Array& x, const Array& weights) {
  if (x.ndim() != 2 || weights.ndim() != 2 || x.shape(1) != weights.shape(0)) {
    throw py::value_error("x of shape " + shape_text(x) + " does not fit weights of shape " +
                          shape_text(weights));
  }
  return {x.shape(0), x.shape(1), weights.shape(1)};
}

bool brief(const DenseSizes& s) { return area(area(s.rows, s.inputs), s.units) <= kBrief; }

void dense_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                   bool relu) {
  const DenseSizes s = check_dense(x, weights);
  const float* from = in<float>(x, "x", x.size());
  const float* factors = in<float>(weights, "weights", weights.size());
  const float* shift = in<float>(bias, "bias", s.units);
  float* to = out<float>(y, "y", area(s.rows, s.units));
  InterpreterRelease release(brief(s));
  nn::dense_forward(from, factors, shift, to, s.rows, s.inputs, s.units, relu);
}

void dense_gradient(const Array& x, const Array& weights, const Array& g, const MaybeArray& y,
                    MaybeArray x_gradient, MaybeArray weight_gradient, MaybeArray bias_gradient) {
  const DenseSizes s = check_dense(x, weights);
  const Index size = area(s.rows, s.units);
  const nn::DenseGradient a{in<float>(x, "x", x.size()),
                            in<float>(weights, "weights", weights.size()),
                            in<float>(g, "g", size),
                            in<float>(y, "y", size),
                            out<float>(x_gradient, "x_gradient", x.size()),
                            out<float>(weight_gradient, "weight_gradient", weights.size()),
                            out<float>(bias_gradient, "bias_gradient", s.units),
                            s.rows,
                            s.inputs,
                            s.units};
  InterpreterRelease release(brief(s));
  nn::dense_gradient(a);
}

// How many rows of so many channels an array has.
Index rows_of(const Array& a, const char* name, Index channels) {
  if (channels < 1) throw py::value_error("there must be at least one channel");
  return count(a, name, channels);
}

void batch_moments(const Array& x, Array& mean, Array& variance) {
  const Index channels = mean.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    T* means = out<T>(mean, "mean", channels);
    T* variances = out<T>(variance, "variance", channels);
    InterpreterRelease release;
    nn::batch_moments(from, means, variances, rows, channels);
  });
}

void batch_scale(const Array& x, const Array& mean, const Array& factor, const Array& shift,
                 Array& y, bool relu) {
  const Index channels = factor.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* means = in<T>(mean, "mean", channels);
    const T* factors = in<T>(factor, "factor", channels);
    const T* shifts = in<T>(shift, "shift", channels);
    T* to = out<T>(y, "y", x.size());
    InterpreterRelease release;
    nn::batch_scale(from, means, factors, shifts, to, rows, channels, relu);
  });
}

// What cuts gradients off at relu(... factor + bias).
void check_cut(const MaybeArray& factor, const MaybeArray& bias) {
  if (factor.has_value() != bias.has_value()) {
    throw py::value_error("factor and bias of the result that relu cuts off go together");
  }
}

void batch_sums(const Array& g, const Array& x, const Array& mean, Array& sums, Array& products,
                const MaybeArray& factor, const MaybeArray& bias) {
  check_cut(factor, bias);
  const Index channels = mean.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* gradient = in<T>(g, "g", x.size());
    const T* from = in<T>(x, "x", x.size());
    const T* means = in<T>(mean, "mean", channels);
    T* first = out<T>(sums, "sums", channels);
    T* second = out<T>(products, "products", channels);
    const T* factors = in<T>(factor, "factor", channels);
    const T* biases = in<T>(bias, "bias", channels);
    InterpreterRelease release;
    nn::batch_sums(gradient, from, means, factors, biases, first, second, rows, channels);
  });
}

void batch_combine(const Array& g, const Array& x, const Array& mean, const Array& by_g,
                   const Array& by_x, const Array& shift, Array& dx, const MaybeArray& factor,
                   const MaybeArray& bias) {
  check_cut(factor, bias);
  const Index channels = by_g.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* gradient = in<T>(g, "g", x.size());
    const T* from = in<T>(x, "x", x.size());
    const T* means = in<T>(mean, "mean", channels);
    const T* gs = in<T>(by_g, "by_g", channels);
    const T* xs = in<T>(by_x, "by_x", channels);
    const T* shifts = in<T>(shift, "shift", channels);
    T* to = out<T>(dx, "dx", x.size());
    const T* factors = in<T>(factor, "factor", channels);
    const T* biases = in<T>(bias, "bias", channels);
    InterpreterRelease release;
    nn::batch_combine(gradient, from, means, gs, xs, shifts, factors, biases, to, rows, channels);
  });
}

using Arrays = std::vector<py::array>;

// Several arrays as one run of numbers, to be divided among threads.
template <typename T>
struct Run {
  std::vector<T*> data;

  Run(const Arrays& arrays, const char* name, const std::vector<Index>& sizes) {
    if (arrays.size() != sizes.size()) {
      throw py::value_error("there are " + std::to_string(arrays.size()) + " arrays " + name +
                            " for " + std::to_string(sizes.size()) + " parameters");
    }
    for (std::size_t k = 0; k < arrays.size(); ++k) {
      check<std::remove_const_t<T>>(arrays[k], name, sizes[k], !std::is_const_v<T>);
      data.push_back(static_cast<T*>(const_cast<void*>(arrays[k].data())));
    }
  }
};

std::vector<Index> sizes_of(const Arrays& arrays) {
  std::vector<Index> sizes;
  for (const Array& a : arrays) sizes.push_back(a.size());
  return sizes;
}

// Calls body(k, first, count) for ranges of the numbers of arrays k = 0, 1, ... of these sizes,
// which together are all of them.
template <typename Body>
void over_all(const std::vector<Index>& sizes, const Body& body) {
  const Index total = std::accumulate(sizes.begin(), sizes.end(), Index{0});
  InterpreterRelease release(total <= kBrief / 8);
  by_parts(total, [&](Index first, Index last) {
    Index begin = 0;
    for (std::size_t k = 0; k < sizes.size(); begin += sizes[k++]) {
      const Index from = std::max(first - begin, Index{0});
      const Index to = std::min(last - begin, sizes[k]);
      if (from < to) body(k, from, to - from);
    }
  });
}

// Whether these are arrays of one of our types, as the kernels read them, and those of each place
// have one shape.
bool alike(const std::vector<std::vector<py::object>>& columns) {
  const py::dtype real = py::dtype::of<float>(), wide = py::dtype::of<double>();
  constexpr int kPlain = int{py::array::c_style} | int{py::detail::npy_api::NPY_ARRAY_ALIGNED_};
  py::object kind;
  for (const auto& column : columns) {
    if (column.size() != columns[0].size()) return false;
    for (std::size_t k = 0; k < column.size(); ++k) {
      if (!py::isinstance<py::array>(column[k])) return false;
      const auto array = py::reinterpret_borrow<py::array>(column[k]);
      if (!kind) kind = array.dtype();
      if (!array.dtype().is(kind) || (array.flags() & kPlain) != kPlain) return false;
      const auto first = py::reinterpret_borrow<py::array>(columns[0][k]);
      if (!std::equal(array.shape(), array.shape() + array.ndim(), first.shape(),
                      first.shape() + first.ndim())) {
        return false;
      }
    }
  }
  return kind && (kind.is(real) || kind.is(wide));
}

void adam_update(const Arrays& p, const Arrays& g, const Arrays& m, const Arrays& v, double alpha,
                 double beta1, double beta2, double epsilon) {
  if (p.empty()) return;
  with_real(p[0], "p", [&](auto zero) {
    using T = decltype(zero);
    const std::vector<Index> sizes = sizes_of(p);
    const Run<T> parameters(p, "p", sizes), first(m, "m", sizes), second(v, "v", sizes);
    const Run<const T> gradients(g, "g", sizes);
    over_all(sizes, [&](std::size_t k, Index at, Index count) {
      nn::adam_update(parameters.data[k] + at, gradients.data[k] + at, first.data[k] + at,
                      second.data[k] + at, count, alpha, beta1, beta2, epsilon);
    });
  });
}

void sgd_update(const Arrays& p, const Arrays& g, const std::optional<Arrays>& velocity,
                double rate, double momentum, bool nesterov) {
  if (p.empty()) return;
  with_real(p[0], "p", [&](auto zero) {
    using T = decltype(zero);
    const std::vector<Index> sizes = sizes_of(p);
    const Run<T> parameters(p, "p", sizes);
    const Run<const T> gradients(g, "g", sizes);
    std::optional<Run<T>> speeds;
    if (velocity) speeds.emplace(*velocity, "velocity", sizes);
    over_all(sizes, [&](std::size_t k, Index at, Index count) {
      nn::sgd_update(parameters.data[k] + at, gradients.data[k] + at,
                     speeds ? speeds->data[k] + at : nullptr, count, rate, momentum, nesterov);
    });
  });
}

void rmsprop_update(Array& p, const Array& g, Array& v, MaybeArray mean, MaybeArray speed,
                    double rate, double rho, double momentum, double epsilon) {
  with_real(p, "p", [&](auto zero) {
    using T = decltype(zero);
    const Index n = p.size();
    T* parameter = out<T>(p, "p", n);
    const T* gradient = in<T>(g, "g", n);
    T* squares = out<T>(v, "v", n);
    T* means = out<T>(mean, "mean", n);
    T* steps = out<T>(speed, "speed", n);
    InterpreterRelease release;
    nn::rmsprop_update(parameter, gradient, squares, means, steps, n, rate, rho, momentum, epsilon);
  });
}

void adagrad_update(Array& p, const Array& g, Array& a, double rate, double epsilon) {
  with_real(p, "p", [&](auto zero) {
    using T = decltype(zero);
    const Index n = p.size();
    T* parameter = out<T>(p, "p", n);
    const T* gradient = in<T>(g, "g", n);
    T* sums = out<T>(a, "a", n);
    InterpreterRelease release;
    nn::adagrad_update(parameter, gradient, sums, n, rate, epsilon);
  });
}

}  // namespace

void bind_nn(py::module_& m) {
  py::class_<Window>(m, "Window",
                     "Geometry of a window sliding over an image [height, width, channels].")
      .def(py::init([](Index height, Index width, Index channels, Index kernel_h, Index kernel_w,
                       Index stride_h, Index stride_w, Index dilation_h, Index dilation_w,
                       bool same) {
             return nn::make_window(height, width, channels, kernel_h, kernel_w, stride_h, stride_w,
                                    dilation_h, dilation_w, same);
           }),
           "height"_a, "width"_a, "channels"_a, "kernel_h"_a, "kernel_w"_a, "stride_h"_a,
           "stride_w"_a, "dilation_h"_a, "dilation_w"_a, "same"_a)
      .def(
          "cropped",
          [](const Window& w, Index out_h, Index out_w) {
            if (out_h < 1 || out_h > w.out_h || out_w < 1 || out_w > w.out_w) {
              throw py::value_error("a crop must keep between 1 and all rows and columns");
            }
            Window smaller = w;
            smaller.out_h = out_h;
            smaller.out_w = out_w;
            return smaller;
          },
          "out_h"_a, "out_w"_a, "The same window with only the first rows and columns of output.")
      .def_readonly("height", &Window::height)
      .def_readonly("width", &Window::width)
      .def_readonly("channels", &Window::channels)
      .def_readonly("kernel_h", &Window::kernel_h)
      .def_readonly("kernel_w", &Window::kernel_w)
      .def_readonly("stride_h", &Window::stride_h)
      .def_readonly("stride_w", &Window::stride_w)
      .def_readonly("dilation_h", &Window::dilation_h)
      .def_readonly("dilation_w", &Window::dilation_w)
      .def_readonly("pad_top", &Window::pad_top)
      .def_readonly("pad_left", &Window::pad_left)
      .def_readonly("out_h", &Window::out_h)
      .def_readonly("out_w", &Window::out_w);
  m.def("im2col", &im2col, "x"_a, "cols"_a, "window"_a, "first"_a, "rows"_a);
  m.def("col2im", &col2im, "cols"_a, "x"_a, "window"_a, "first"_a, "rows"_a);
  m.def("bias_relu", &bias_relu, "z"_a, "bias"_a, "relu"_a);
  m.def("sum_of_squares", &sum_of_squares, "x"_a);
  m.def("relu", &relu, "x"_a, "y"_a);
  m.def("add_relu", &add_relu, "x"_a, "y"_a, "z"_a);
  m.def("relu_gradient", &relu_gradient, "g"_a, "y"_a, "dz"_a, "bias_gradient"_a);
  m.def("softmax_cross_entropy", &softmax_cross_entropy, "logits"_a, "labels"_a, "losses"_a,
        "gradient"_a);
  m.def("max_pool", &max_pool, "x"_a, "bias"_a, "y"_a, "codes"_a, "window"_a, "relu"_a);
  m.def("max_pool_gradient", &max_pool_gradient, "g"_a, "codes"_a, "dx"_a, "bias_gradient"_a,
        "window"_a);
  m.def("vector_bytes", &nn::vector_bytes,
        "The width of the registers that the kernels use on this processor.");
  m.def("limit_vector_bytes", &nn::limit_vector_bytes, "bytes"_a,
        "Let kernels use no wider registers than these; return the limit before.");
  m.def("threads", &nn::threads, "How many threads a kernel works on at most.");
  m.def("set_threads", &nn::set_threads, "count"_a, "Set how many threads a kernel works on.");
  m.def("direct_forward", &direct_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "codes"_a,
        "window"_a, "pool"_a, "relu"_a);
  m.def("direct_gradient", &direct_gradient, "x"_a, "g"_a, "y"_a, "codes"_a, "weight_gradient"_a,
        "bias_gradient"_a, "window"_a, "pool"_a);
  m.def("winograd_forward", &winograd_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "codes"_a,
        "window"_a, "pool"_a, "relu"_a);
  m.def("winograd_gradient", &winograd_gradient, "x"_a, "weights"_a, "g"_a, "y"_a, "x_gradient"_a,
        "weight_gradient"_a, "bias_gradient"_a, "window"_a);
  m.def("sparse_gradient", &sparse_gradient, "x"_a, "weights"_a, "g"_a, "codes"_a, "x_gradient"_a,
        "weight_gradient"_a, "bias_gradient"_a, "window"_a, "pool"_a);
  m.def("sparse_fits", &nn::sparse_fits, "window"_a, "filters"_a,
        "Whether sparse_gradient has room for the places in such images and weights.");
  m.def("blocked_forward", &blocked_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "codes"_a,
        "window"_a, "pool"_a, "relu"_a);
  m.def("blocked_gradient", &blocked_gradient, "x"_a, "weights"_a, "g"_a, "y"_a, "codes"_a,
        "x_gradient"_a, "weight_gradient"_a, "bias_gradient"_a, "window"_a, "pool"_a);
  m.def("dense_forward", &dense_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "relu"_a);
  m.def("dense_gradient", &dense_gradient, "x"_a, "weights"_a, "g"_a, "y"_a, "x_gradient"_a,
        "weight_gradient"_a, "bias_gradient"_a);
  m.def("batch_moments", &batch_moments, "x"_a, "mean"_a, "variance"_a);
  m.def("batch_scale", &batch_scale, "x"_a, "mean"_a, "factor"_a, "shift"_a, "y"_a,
        "relu"_a = false);
  m.def("batch_sums", &batch_sums, "g"_a, "x"_a, "mean"_a, "sums"_a, "products"_a,
        "factor"_a = py::none(), "bias"_a = py::none());
  m.def("batch_combine", &batch_combine, "g"_a, "x"_a, "mean"_a, "by_g"_a, "by_x"_a, "shift"_a,
        "dx"_a, "factor"_a = py::none(), "bias"_a = py::none());
  m.def("alike", &alike, "columns"_a,
        "Whether lists hold arrays of one type that kernels take, of equal shapes at each place.");
  m.def("adam_update", &adam_update, "p"_a, "g"_a, "m"_a, "v"_a, "alpha"_a, "beta1"_a, "beta2"_a,
        "epsilon"_a);
  m.def("sgd_update", &sgd_update, "p"_a, "g"_a, "velocity"_a, "rate"_a, "momentum"_a,
        "nesterov"_a);
  m.def("rmsprop_update", &rmsprop_update, "p"_a, "g"_a, "v"_a, "mean"_a, "speed"_a, "rate"_a,
        "rho"_a, "momentum"_a, "epsilon"_a);
  m.def("add_multiple", &add_multiple, "x"_a, "factor"_a, "y"_a, "z"_a);
  m.def("adagrad_update", &adagrad_update, "p"_a, "g"_a, "a"_a, "rate"_a, "epsilon"_a);
}

}  // namespace pycollective
