// Matrix products with bias and relu, for layers that fit into caches.
#include <algorithm>

#include "nn/kernels.h"
#include "nn/products.h"
#include "support/parallel.h"

namespace pycollective::nn {
namespace {

thread_local Scratch part_scratch, call_scratch;

// With fewer products, waking other threads takes longer than it saves.
constexpr Index kSmall = 1 << 18;

// c [rows, columns] = a b. Threads divide the rows of a or the columns of b. Each thread reads the
// whole other factor, so the smaller factor should not be divided.
void multiply(const Factor& a, const Factor& b, float* c, Index rows, Index columns, Index depth) {
  if (depth == 0) {
    std::fill(c, c + rows * columns, 0.0f);
    return;
  }
  const Products products = pick_products();
  const Index panels = products.count_panels(columns);
  const int most = rows * columns * depth < kSmall ? 1 : threads();
  if (panels >= most && rows <= columns) {
    in_parallel(most, [&](int part) {
      products.multiply(a, b, c, rows, columns, depth, false, begin_of_part(panels, part, most),
                        begin_of_part(panels, part + 1, most), part_scratch);
    });
    return;
  }
  const int parts = static_cast<int>(std::clamp<Index>(rows, 1, most));
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(rows, part, parts);
    products.multiply({a.data + first * a.row, a.row, a.step}, b, c + first * columns,
                      begin_of_part(rows, part + 1, parts) - first, columns, depth, false, 0,
                      panels, part_scratch);
  });
}

}  // namespace

void dense_forward(const float* x, const float* weights, const float* bias, float* y, Index rows,
                   Index inputs, Index units, bool relu) {
  multiply({x, inputs, 1}, {weights, units, 1}, y, rows, units, inputs);
  bias_relu(y, bias, rows, units, relu);
}

void dense_gradient(const DenseGradient& a) {
  const float* dz = a.g;
  if (a.bias_gradient) std::fill(a.bias_gradient, a.bias_gradient + a.units, 0.0f);
  if (a.y) {
    call_scratch.reserve(a.rows * a.units, 1);
    float* masked = call_scratch.take(a.rows * a.units);
    relu_gradient(a.g, a.y, masked, a.bias_gradient, a.rows, a.units);
    dz = masked;
  } else if (a.bias_gradient) {
    relu_gradient(a.g, nullptr, nullptr, a.bias_gradient, a.rows, a.units);
  }
  if (a.weight_gradient) {
    multiply({a.x, 1, a.inputs}, {dz, a.units, 1}, a.weight_gradient, a.inputs, a.units, a.rows);
  }
  if (a.x_gradient) {
    multiply({dz, a.units, 1}, {a.weights, 1, a.units}, a.x_gradient, a.rows, a.inputs, a.units);
  }
}

}  // namespace pycollective::nn
