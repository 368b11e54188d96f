// The XLA custom call around matmul_*.cc: checks, the choice of instruction set, and the division
// of work over XLA's own thread pool.

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include "matmul.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

constexpr int64_t kVnniRows = 4;  // from there on the matrix unit is faster

// The named variant, or the fastest one if the name is empty. Null if this machine, or the dtype of x, has none.
const Multiplier* choose(std::string_view name, bool bfloat16, int64_t rows) {
  const auto wanted = [&](const char* variant) { return name.empty() || name == variant; };
#if defined(__x86_64__)
#if defined(__linux__)
  static const bool has_amx = amx_available();  // asked once: cpuid leaves a virtual machine each time
  if (wanted("amx") && bfloat16 && has_amx && (rows > kVnniRows || !name.empty())) return &kMatmulAmx;
#endif
  if (wanted("vnni") && bfloat16 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
    return &kMatmulVnni;
  }
  if (wanted("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &kMatmulAvx512;
  }
  if (wanted("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kMatmulAvx2;
#endif
  return wanted("portable") ? &kMatmulBaseline : nullptr;
}

// Rearranges x: an item is kPackRows rows.
struct Packing final : Shared {
  Matmul matmul;
  const Multiplier* variant;
  void* packed;

  void work() override {
    for (int64_t item = next.fetch_add(1); item < items; item = next.fetch_add(1)) {
      variant->pack(matmul, item * kPackRows, packed);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Computes y: an item is a block. Neighbours share their rows of the weight only if all rows do not fit into one block.
struct Product final : Shared {
  Matmul matmul;
  const Multiplier* variant;
  Block block;
  std::unique_ptr<Scratch> packed;
  int64_t columns = 0;  // blocks beside each other

  void work() override {
    int64_t item = next.fetch_add(1);
    if (item >= items) return;
    const Scratch scratch(variant->scratch_bytes(matmul));
    for (; item < items; item = next.fetch_add(1)) {
      const int64_t out = item % columns * block.outs, row = item / columns * block.rows;
      const Block part = {out, std::min(block.outs, matmul.w.out - out), row, std::min(block.rows, matmul.rows - row)};
      variant->multiply(matmul, packed->get(), part, scratch.get());
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

void multiply_all(const Matmul& matmul, const Multiplier* variant, ffi::ThreadPool& threads) {
  auto product = std::make_shared<Product>();
  product->matmul = matmul;
  product->variant = variant;
  product->packed = std::make_unique<Scratch>(variant->packed_bytes(matmul));
  product->block = variant->block(matmul);
  product->columns = parts(matmul.w.out, product->block.outs);
  product->items = product->columns * parts(matmul.rows, product->block.rows);

  auto packing = std::make_shared<Packing>();
  packing->matmul = matmul;
  packing->variant = variant;
  packing->packed = product->packed->get();
  packing->items = parts(matmul.rows, kPackRows);
  const int64_t work_per_number = 4;
  run(packing, matmul.rows * matmul.w.inner * work_per_number, threads);
  run(product, matmul.rows * matmul.w.out * matmul.w.inner, threads);
}

bool is_number(ffi::DataType type) { return type == ffi::BF16 || type == ffi::F32; }

bool is_matrix(const ffi::AnyBuffer& buffer, int64_t rows) {
  return buffer.dimensions().size() == 2 && buffer.dimensions()[0] == rows;
}

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("matmul: " + what); }

// Fills in where the scales and zeros of a quantised weight lie.
ffi::Error add_scales(Weight& w, const ffi::RemainingArgs& rest) {
  if (rest.size() != 1 && rest.size() != 2) return invalid("codes come with scales, and perhaps zeros");
  for (size_t i = 0; i < rest.size(); ++i) {
    const auto numbers = rest.get<ffi::AnyBuffer>(i);
    if (!numbers.has_value() || !is_matrix(*numbers, w.out) || !is_number(numbers->element_type())) {
      return invalid("scales and zeros are matrices of bfloat16 or float32 with a row for each output");
    }
    (i ? w.zeros : w.scales) = numbers->untyped_data();
    (i ? w.wide_zeros : w.wide_scales) = numbers->element_type() == ffi::F32;
    const int64_t groups = numbers->dimensions()[1];
    if (groups == 0 || w.inner % groups || (i && groups != w.groups)) return invalid("groups do not divide the inputs");
    w.groups = groups;
    w.group = w.inner / groups;
  }
  if (w.groups > 1 && w.group % kStep) return invalid("groups must be multiples of " + std::to_string(kStep));
  return ffi::Error::Success();
}

ffi::Error matmul(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> y, int64_t bits, std::string_view variant) {
  if (x.dimensions().size() != 2 || w.dimensions().size() != 2) return invalid("operands must be matrices");
  const int64_t rows = x.dimensions()[0], inner = x.dimensions()[1], out = w.dimensions()[0];
  if (!is_number(x.element_type()) || !is_number(y->element_type())) return invalid("no kernel for this dtype");
  const bool bfloat16 = x.element_type() == ffi::BF16;
  const int64_t units = parts(inner, kUnitSteps * kStep) * kUnitSteps * kStep;
  const int64_t per_row = bits == 16 || bits == 8 ? inner : bits == 4 ? parts(inner, 128) * 64 : units * 3 / 8;
  if (bits != 16 && bits != 8 && bits != 4 && bits != 3) return invalid("weights have 16, 8, 4 or 3 bits");
  if (w.element_type() != (bits == 16 ? ffi::BF16 : ffi::U8) || w.dimensions()[1] != per_row) {
    return invalid("the weight does not have the form of " + std::to_string(bits) + " bits");
  }
  Matmul m = {};
  m.w.data = static_cast<const uint8_t*>(w.untyped_data());
  m.w.bits = static_cast<int>(bits);
  m.w.out = out;
  m.w.inner = m.w.group = inner;
  m.w.groups = 1;
  m.w.row_bytes = per_row * (bits == 16 ? 2 : 1);
  if (bits != 16) {
    auto error = add_scales(m.w, rest);
    if (error.failure()) return error;
  }
  m.x = x.untyped_data();
  m.y = y->untyped_data();
  m.x_bfloat16 = bfloat16;
  m.y_bfloat16 = y->element_type() == ffi::BF16;
  m.rows = rows;
  const Multiplier* multiplier = choose(variant, bfloat16, rows);
  if (multiplier == nullptr) return invalid("this machine has no variant " + std::string(variant) + " for this dtype");
  multiply_all(m, multiplier, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_matmul, jaxserve::matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<std::string_view>("variant"));

// Whether this machine has the named variant of the product, for bfloat16.
extern "C" bool jaxserve_has_matmul(const char* name, size_t length) {
  return jaxserve::choose({name, length}, true, 1) != nullptr;
}
