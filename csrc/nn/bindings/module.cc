#include <pybind11/pybind11.h>

#include "nn/bindings/bindings.h"
#include "nn/processor.h"
#include "nn/window.h"
#include "support/interpreter_release.h"
#include "support/parallel.h"

namespace py = pybind11;
using namespace pybind11::literals;
using pycollective::nn::Index;
using pycollective::nn::Window;
namespace nn = pycollective::nn;

PYBIND11_MODULE(_nn, m) {
  m.doc() = "Kernels for neural networks, where NumPy has no fast function.";
  pycollective::share_interpreter_lock();
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
          "out_h"_a, "out_w"_a,
          "Return the same window with only the first rows and columns of output.")
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
  m.def("vector_bytes", &nn::vector_bytes,
        "Return the width in bytes of the registers that the kernels use on this processor.");
  m.def("limit_vector_bytes", &nn::limit_vector_bytes, "bytes"_a,
        "Limit the width of the registers that kernels use; return the previous limit.");
  m.def("threads", &pycollective::threads, "Return the maximum number of threads of a kernel.");
  m.def("set_threads", &pycollective::set_threads, "count"_a,
        "Set the maximum number of threads of a kernel.");
  pycollective::bind_convolution(m);
  pycollective::bind_pooling(m);
  pycollective::bind_pointwise(m);
  pycollective::bind_dense(m);
  pycollective::bind_normalization(m);
  pycollective::bind_record(m);
  pycollective::bind_update(m);
}
