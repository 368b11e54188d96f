// Root-mean-square normalisation of rows [R, C] in float32, as an XLA custom call.

#include <cmath>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error rms_norm(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, float eps,
                    ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = x.dimensions();
  if (shape.size() != 2) return ffi::Error::InvalidArgument("rms_norm: x must have two axes");
  const int64_t rows = shape[0], columns = shape[1];
  if (static_cast<int64_t>(weight.element_count()) != columns) {
    return ffi::Error::InvalidArgument("rms_norm: weight must have as many elements as x has columns");
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x.typed_data() + row * columns;
    float* out = y->typed_data() + row * columns;
    float squares = 0;
    for (int64_t column = 0; column < columns; ++column) squares += in[column] * in[column];
    const float scale = 1 / std::sqrt(squares / columns + eps);
    for (int64_t column = 0; column < columns; ++column) out[column] = in[column] * scale * weight.typed_data()[column];
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(example_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Ret<ffi::Buffer<ffi::F32>>());
