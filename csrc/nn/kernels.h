// Kernels of neural-network operations. Arrays are in C order, images are [n, height, width,
// channels]. The kernels do not check arguments: the bindings check every size before the call.
//
// Most kernels with PYCOLLECTIVE_CLONES are templates (`..._body`) that are inlined into one
// function per type, because PYCOLLECTIVE_CLONES works for functions, not for templates.
#pragma once

#include <cstdint>
#include <string_view>

#include "nn/window.h"
#include "support/simd.h"

namespace pycollective::nn {

// ---- patches <-> images (patches.cc) ----------------------------------------------------------
// [first, first + rows) is a block of the n * out_h output rows. cols: [rows * out_w, kernel_h *
// kernel_w * channels], zero for taps in the padding.
void im2col(const float* x, float* cols, const Window& w, Index first, Index rows);
void im2col(const double* x, double* cols, const Window& w, Index first, Index rows);
// The transpose of im2col: adds every element of cols to its pixel in x.
void col2im(const float* cols, float* x, const Window& w, Index first, Index rows);
void col2im(const double* cols, double* x, const Window& w, Index first, Index rows);

// ---- bias and relu (pointwise.cc) -------------------------------------------------------------
// z = act(z + bias) for z [rows, channels]; bias may be null. Here and below, act is relu if
// `relu`, else the identity. NaN stays NaN.
void bias_relu(float* z, const float* bias, Index rows, Index channels, bool relu);
void bias_relu(double* z, const double* bias, Index rows, Index channels, bool relu);
float sum_of_squares(const float* x, Index size);
double sum_of_squares(const double* x, Index size);
// z = y + factor x; z may be y.
void add_multiple(const float* x, double factor, const float* y, float* z, Index size);
void add_multiple(const double* x, double factor, const double* y, double* z, Index size);
// dz = g where y > 0, else 0; if y is null, dz = g. bias_gradient += column sums of dz. dz and
// bias_gradient may be null.
void relu_gradient(const float* g, const float* y, float* dz, float* bias_gradient, Index rows,
                   Index channels);
void relu_gradient(const double* g, const double* y, double* dz, double* bias_gradient, Index rows,
                   Index channels);

// ---- softmax and layer normalization (rows.cc) -------------------------------------------------
// y = softmax of x [rows, classes], or its logarithm. classes > 0. A row with NaN gives NaN.
void softmax(const float* x, float* y, Index rows, Index classes, bool logarithm);
void softmax(const double* x, double* y, Index rows, Index classes, bool logarithm);
// dx = the gradient of softmax with the result y.
void softmax_gradient(const float* g, const float* y, float* dx, Index rows, Index classes,
                      bool logarithm);
void softmax_gradient(const double* g, const double* y, double* dx, Index rows, Index classes,
                      bool logarithm);
// Softmax of logits [rows, classes]. losses[r] = -log p(label). gradient = p - onehot(label),
// unless null. Labels must be in [0, classes).
void softmax_cross_entropy(const float* logits, const Index* labels, float* losses, float* gradient,
                           Index rows, Index classes);
void softmax_cross_entropy(const double* logits, const Index* labels, double* losses,
                           double* gradient, Index rows, Index classes);

// y = (x - mean) / sqrt(variance + epsilon) factor + shift, with mean and variance of each row of x
// [rows, size]. Writes the means to `means`, and the inverses of the square roots to `inverses`.
void normalize_rows(const float* x, const float* factor, const float* shift, float* y, float* means,
                    float* inverses, Index rows, Index size, double epsilon);
void normalize_rows(const double* x, const double* factor, const double* shift, double* y,
                    double* means, double* inverses, Index rows, Index size, double epsilon);
// dx = the gradient of x [rows, size]. Adds the gradients of factor and shift to by_factor and
// by_shift.
void normalize_rows_gradient(const float* g, const float* x, const float* factor,
                             const float* means, const float* inverses, float* dx, float* by_factor,
                             float* by_shift, Index rows, Index size);
void normalize_rows_gradient(const double* g, const double* x, const double* factor,
                             const double* means, const double* inverses, double* dx,
                             double* by_factor, double* by_shift, Index rows, Index size);

// ---- tables of kernels -------------------------------------------------------------------------
// Returns the kernel of a table that has this name, or null.
template <typename Table>
auto find(const Table& all, std::string_view name) -> decltype(&all[0]) {
  for (const auto& each : all) {
    if (each.name == name) return &each;
  }
  return nullptr;
}

// ---- activations (activations.cc) --------------------------------------------------------------
// values: y = f(x). gradients: dx = g f'(x). elu and leaky_relu use alpha, clip also beta.
template <typename T>
struct Activation {
  std::string_view name;
  void (*values)(const T* x, T alpha, T beta, T* y, Index size);
  void (*gradients)(const T* g, const T* x, T alpha, T beta, T* dx, Index size);
};

// Returns null for an unknown name.
template <typename T>
const Activation<T>* find_activation(std::string_view name);

// ---- operations of two operands (binary.cc) -----------------------------------------------------
// values: z = f(x, y). gradients: dx and dy from the gradient g of z; one of them may be null.
template <typename T>
struct Binary {
  std::string_view name;
  void (*values)(const T* x, const T* y, T* z, Index size);
  void (*gradients)(const T* g, const T* x, const T* y, T* dx, T* dy, Index size);
};

// Returns null for an unknown name.
template <typename T>
const Binary<T>* find_binary(std::string_view name);

// z = x where the mask is not 0, else y.
void select(const std::uint8_t* mask, const float* x, const float* y, float* z, Index size);
void select(const std::uint8_t* mask, const double* x, const double* y, double* z, Index size);

// ---- losses of targets and predictions [rows, size] (rows.cc) -----------------------------------
// `rows` computes the losses of rows from targets t and predictions p, and their derivatives by p
// in `slopes`, unless null. c is the parameter of the loss. With `labels`, c is 1 if all targets
// are 0 or 1, else 0.
template <typename T>
struct Loss {
  std::string_view name;
  bool labels;
  void (*rows)(const T* t, const T* p, T* losses, T* slopes, Index rows, Index size, T c);
};

// Returns null for an unknown name.
template <typename T>
const Loss<T>* find_loss(std::string_view name);

// ---- reductions (reductions.cc) ----------------------------------------------------------------
enum class Reduction { kSum, kMaximum, kMinimum, kProduct };
// y [outer, inner] = the sums, maxima, minima or products of x [outer, count, inner]; no size is 0.
// NaN gives NaN.
void reduce(Reduction kind, const float* x, float* y, Index outer, Index count, Index inner);
void reduce(Reduction kind, const double* x, double* y, Index outer, Index count, Index inner);
// dx = the gradient of the maxima or minima `top` [outer, inner] of x [outer, count, inner]. Equal
// elements share it.
void extremum_gradient(const float* x, const float* top, const float* g, float* dx, Index outer,
                       Index count, Index inner);
void extremum_gradient(const double* x, const double* top, const double* g, double* dx, Index outer,
                       Index count, Index inner);

// ---- copies (copies.cc) ------------------------------------------------------------------------
// Sizes of the axes of an array, and the strides of two arrays in bytes.
struct Strided {
  static constexpr int kMostAxes = 32;
  int axes;
  Index sizes[kMostAxes], from[kMostAxes], to[kMostAxes];
};
// Copies elements of `item` bytes. Returns false, without doing anything, if this is not 1, 2, 4 or
// 8.
bool copy(const Strided& strided, const char* from, char* to, Index item);
// y[index[r]] += rows[r] for rows [count, width] and y [height, width].
void add_rows(const float* rows, const Index* index, float* y, Index count, Index width,
              Index height);
void add_rows(const double* rows, const Index* index, double* y, Index count, Index width,
              Index height);

// ---- max pooling (pool.cc) --------------------------------------------------------------------
// The code of an output is the number of the window's tap with the maximum, counted row by row. The
// first maximum counts; NaN is greater than every number. With relu, kNone marks outputs that are
// not positive: they have no gradient.
template <typename Code>
inline constexpr Code kNone = static_cast<Code>(~Code{0});

// Returns true if every code is below `taps` or kNone.
bool codes_fit(const std::uint8_t* codes, Index size, std::uint8_t taps);
bool codes_fit(const std::uint32_t* codes, Index size, std::uint32_t taps);

// y = act(max over the window of x + bias); bias may be null.
void max_pool(const float* x, const float* bias, float* y, std::uint8_t* codes, const Window& w,
              Index images, bool relu);
void max_pool(const double* x, const double* bias, double* y, std::uint8_t* codes, const Window& w,
              Index images, bool relu);
void max_pool(const float* x, const float* bias, float* y, std::uint32_t* codes, const Window& w,
              Index images, bool relu);
void max_pool(const double* x, const double* bias, double* y, std::uint32_t* codes, const Window& w,
              Index images, bool relu);
// dx = the gradient of max_pool with respect to x (every element is written). bias_gradient += the
// sums of dx by channel, unless null.
void max_pool_gradient(const float* g, const std::uint8_t* codes, float* dx, float* bias_gradient,
                       const Window& w, Index images);
void max_pool_gradient(const double* g, const std::uint8_t* codes, double* dx,
                       double* bias_gradient, const Window& w, Index images);
void max_pool_gradient(const float* g, const std::uint32_t* codes, float* dx, float* bias_gradient,
                       const Window& w, Index images);
void max_pool_gradient(const double* g, const std::uint32_t* codes, double* dx,
                       double* bias_gradient, const Window& w, Index images);

// ---- depthwise convolution and average pooling (depthwise.cc) ---------------------------------
// Each channel has its own weights [kernel_h, kernel_w, channels]. y is the sum of x times weights
// over the window's taps inside the image, plus the bias unless null. Without weights, y is the
// mean of these taps.
void depthwise_forward(const float* x, const float* weights, const float* bias, float* y,
                       const Window& w, Index images);
void depthwise_forward(const double* x, const double* weights, const double* bias, double* y,
                       const Window& w, Index images);
// Overwrites the gradient of the images.
void depthwise_gradient(const float* g, const float* weights, float* dx, const Window& w,
                        Index images);
void depthwise_gradient(const double* g, const double* weights, double* dx, const Window& w,
                        Index images);
// Overwrites the gradient of the weights.
void depthwise_weight_gradient(const float* x, const float* g, float* weight_gradient,
                               const Window& w, Index images);
void depthwise_weight_gradient(const double* x, const double* g, double* weight_gradient,
                               const Window& w, Index images);

// ---- resampling of images (depthwise.cc) -------------------------------------------------------
struct Resampling {
  Index images, height, width, out_h, out_w, channels;
};
// y [images, out_h, out_w, channels] = the sums of the pixels of x [images, height, width,
// channels] times their weights. A weight is down [out_h, height] times across [out_w, width].
// Pixels of weight 0 are not read.
void resample(const float* x, const float* down, const float* across, float* y,
              const Resampling& r);
void resample(const double* x, const double* down, const double* across, double* y,
              const Resampling& r);

// ---- convolution ------------------------------------------------------------------------------
// Without `pool`: y [n, out_h, out_w, filters] = act(conv(x, weights) + bias). With `pool`, a
// window over the convolution's output without padding: y and codes are those of max_pool.
struct ConvolutionForward {
  const float* x;
  const float* weights;
  const float* bias;
  float* y;
  std::uint8_t* codes;
  const Window& w;
  const Window* pool;
  Index images, filters;
  bool relu;
};
// Handles one or three channels with 3 x 3 filters and stride 1, with relu and 2 x 2 pooling
// (direct.cc).
void direct_forward(const ConvolutionForward& a);

// ---- 3 x 3 filters with stride 1 (winograd.cc) ------------------------------------------------
// A pooling window must be 2 x 2 with a stride of 2.
void winograd_forward(const ConvolutionForward& a);
// Without pooling. Overwrites the gradients of the images, the weights and the bias that are not
// null. Uses g where y > 0, or everywhere if y is null.
struct WinogradGradient {
  const float* x;
  const float* weights;
  const float* g;
  const float* y;
  float* x_gradient;
  float* weight_gradient;
  float* bias_gradient;
  const Window& w;
  Index images, filters;
};
void winograd_gradient(const WinogradGradient& a);

// ---- gradients of convolution, relu and pooling (sparse.cc) -----------------------------------
// Uses only the g of outputs that relu did not set to 0. Overwrites the gradients of the images,
// the weights and the bias that are not null.
struct SparseGradient {
  const float* x;
  const float* weights;
  const float* g;
  const std::uint8_t* codes;
  float* x_gradient;
  float* weight_gradient;
  float* bias_gradient;
  const Window& w;
  const Window& pool;
  Index images, filters;
};
void sparse_gradient(const SparseGradient& a);
// Returns true if the offsets in the images and weights fit into 32 bits, as the kernel needs.
bool sparse_fits(const Window& w, Index filters);

// ---- convolution of any shape (blocked.cc) ----------------------------------------------------
// Pooling windows must cover the rows of the result without gap or overlap.
void blocked_forward(const ConvolutionForward& a);
// Overwrites the gradients of the images, the weights and the bias that are not null. Without
// `pool`, uses g where y > 0, or everywhere if y is null. With `pool`, codes give the position of
// each g.
struct BlockedGradient {
  const float* x;
  const float* weights;
  const float* g;
  const float* y;
  const std::uint8_t* codes;
  float* x_gradient;
  float* weight_gradient;
  float* bias_gradient;
  const Window& w;
  const Window* pool;
  Index images, filters;
};
void blocked_gradient(const BlockedGradient& a);

// ---- dense layers (dense.cc) -------------------------------------------------------------------
// y [rows, units] = act(x weights + bias); bias may be null.
void dense_forward(const float* x, const float* weights, const float* bias, float* y, Index rows,
                   Index inputs, Index units, bool relu);
// Overwrites the gradients of x [rows, inputs], weights [inputs, units] and bias that are not null.
// Uses g where y > 0, or everywhere if y is null.
struct DenseGradient {
  const float* x;
  const float* weights;
  const float* g;
  const float* y;
  float* x_gradient;
  float* weight_gradient;
  float* bias_gradient;
  Index rows, inputs, units;
};
void dense_gradient(const DenseGradient& a);

// ---- batch normalization (normalize.cc) --------------------------------------------------------
// Mean and variance of each channel of x [rows, channels]; 0 without rows.
void batch_moments(const float* x, float* mean, float* variance, Index rows, Index channels);
void batch_moments(const double* x, double* mean, double* variance, Index rows, Index channels);
// moved = average + (value - average) weight.
void move_average(const float* average, const float* value, float* moved, Index size, float weight);
void move_average(const double* average, const double* value, double* moved, Index size,
                  double weight);
// Each channel is normalized: y = (x - mean) factor / sqrt(variance + epsilon) + shift.
template <typename T>
struct Batch {
  const T* x;       // [rows, channels]
  const T* factor;  // null: ones
  const T* shift;   // null: zeros
  const T* mean;
  const T* variance;
  Index rows, channels;
  T epsilon;
  bool relu;  // y is then max(y, 0)
};
void normalize_batch(const Batch<float>& batch, float* y);
void normalize_batch(const Batch<double>& batch, double* y);
// Writes the gradients of x (unless dx is null), factor and shift for the gradient g of y. Unless
// mean and variance are constant, they are those of x.
void normalize_batch_gradient(const Batch<float>& batch, bool constant, const float* g, float* dx,
                              float* by_factor, float* by_shift);
void normalize_batch_gradient(const Batch<double>& batch, bool constant, const double* g,
                              double* dx, double* by_factor, double* by_shift);

// ---- optimizers (update.cc) -------------------------------------------------------------------
// steps: changes the parameters p and their slots m and v by the gradients g; v is null if a rule
// has one slot. c holds the numbers of the rule.
//
// * "adam": alpha, 1 - beta1, 1 - beta2, epsilon.
// * "adamax": rate, 1 - beta1, beta2, epsilon.
// * "nadam": the factors of m and of g, 1 - beta1, 1 - beta2, the factor of v, epsilon.
// * "adadelta": rate, rho, 1 - rho, epsilon.
// * "adagrad": rate, epsilon.
template <typename T>
struct Rule {
  std::string_view name;
  int slots, numbers;
  void (*steps)(T* p, const T* g, T* m, T* v, Index n, const T* c);
};

// Returns null for an unknown name.
template <typename T>
const Rule<T>* find_rule(std::string_view name);

// Without velocity: p -= rate g. With velocity: velocity = momentum velocity - rate g; p +=
// velocity or, with nesterov, p += momentum velocity - rate g.
void sgd_update(float* p, const float* g, float* velocity, Index n, double rate, double momentum,
                bool nesterov);
void sgd_update(double* p, const double* g, double* velocity, Index n, double rate, double momentum,
                bool nesterov);
// Squares: v = rho v + (1 - rho) g*g. Means, if not null: mean = rho mean + (1 - rho) g.
// Step: step = rate g / sqrt(v - mean*mean + epsilon) + momentum speed; p -= step; speed = step.
// speed may be null: without momentum.
void rmsprop_update(float* p, const float* g, float* v, float* mean, float* speed, Index n,
                    double rate, double rho, double momentum, double epsilon);
void rmsprop_update(double* p, const double* g, double* v, double* mean, double* speed, Index n,
                    double rate, double rho, double momentum, double epsilon);

}  // namespace pycollective::nn
