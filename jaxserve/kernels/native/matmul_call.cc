// The XLA custom call around matmul_*.cc: checks, the choice of a kernel, and the division of work among threads.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "choice.h"
#include "matmul.h"
#include "parallel.h"
#include "variants.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxserve {
namespace {

// The deferred operation on the rows of x.
struct Prologue {
  enum Kind { kNone, kNorm, kSwiglu } kind = kNone;
  const void* x = nullptr;       // [rows, inner], or [rows, parts, 2, inner / parts] for kSwiglu
  const void* weight = nullptr;  // [inner], for kNorm
  float eps = 0;
  int64_t parts = 1;             // for kSwiglu: a model that can be split into shards has gates and ups by shard

  // Computes a row of m.x.
  void apply(const RowFunctions& functions, const Matmul& m, int64_t row) const {
    const int64_t bytes = m.w.inner * (m.x_bfloat16 ? 2 : 4);
    auto* to = static_cast<char*>(const_cast<void*>(m.x)) + row * bytes;
    const auto* from = static_cast<const char*>(x) + row * bytes * (kind == kSwiglu ? 2 : 1);
    if (kind == kNorm) functions.norm(from, weight, eps, m.w.inner, m.x_bfloat16, to);
    const int64_t part = bytes / parts;
    for (int64_t i = 0; kind == kSwiglu && i < parts; ++i) {
      functions.swiglu(from + 2 * i * part, from + (2 * i + 1) * part, m.w.inner / parts, m.x_bfloat16, to + i * part);
    }
  }
};

// The preparation of x (prologue and packing). An item is kPackRows rows.
struct Pack {
  Matmul matmul;
  Prologue prologue;
  const Multiplier* variant;
  void* packed;

  void operator()(int64_t item) const {
    const int64_t first = item * kPackRows, end = std::min(first + kPackRows, matmul.rows);
    if (prologue.kind) {
      for (int64_t row = first; row < end; ++row) prologue.apply(row_functions(), matmul, row);
    }
    variant->pack(matmul, first, packed);
  }
};

struct Packing final : Shared {
  Pack pack;

  explicit Packing(const Pack& pack) : pack(pack) {}
  void work() override {
    for (Items mine(*this); mine.more(); mine.advance()) pack(mine.now());
  }
};

// An optional matrix with the shape and dtype of y, which is added to the rounded product.
struct Residual {
  const void* numbers = nullptr;

  void add_to(const Matmul& m, const Block& part) const {
    if (!numbers) return;
    for (int64_t row = part.row; row < part.row + part.rows; ++row) {
      const int64_t at = (row * m.w.out + part.out) * (m.y_bfloat16 ? 2 : 4);
      row_functions().add(static_cast<const char*>(numbers) + at, part.outs, m.y_bfloat16, static_cast<char*>(m.y) + at);
    }
  }
};

// The computation of y. An item is a block. Neighbouring items have different rows of the weight if all rows of x fit into one
// block.
struct Product final : Shared {
  Matmul matmul;
  Residual residual;
  const Multiplier* variant;
  Block block;
  std::unique_ptr<Scratch> x, packed;
  int64_t columns = 0;  // number of blocks that cover the outputs

  void work() override {
    Items mine(*this);
    if (!mine.more()) return;
    const Scratch scratch(variant->scratch_bytes(matmul));
    for (; mine.more(); mine.advance()) {
      const Block part = block_of(mine.now()), after = mine.knows_after() ? block_of(mine.after()) : Block{};
      variant->multiply(matmul, packed->get(), part, mine.knows_after() ? &after : nullptr, scratch.get());
      residual.add_to(matmul, part);
    }
  }

  Block block_of(int64_t item) const {
    const int64_t out = item % columns * block.outs, row = item / columns * block.rows;
    return {out, std::min(block.outs, matmul.w.out - out), row, std::min(block.rows, matmul.rows - row)};
  }
};

int64_t ceil_div(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

void multiply_all(Matmul matmul, const Prologue& prologue, const Residual& residual, const Multiplier* variant) {
  auto product = std::make_shared<Product>();
  if (prologue.kind) {
    product->x = std::make_unique<Scratch>(matmul.rows * matmul.w.inner * (matmul.x_bfloat16 ? 2 : 4));
    matmul.x = product->x->get();
  }
  product->matmul = matmul;
  product->residual = residual;
  product->variant = variant;
  product->packed = std::make_unique<Scratch>(variant->packed_bytes(matmul));
  Block& block = product->block = variant->block(matmul);
  product->columns = ceil_div(matmul.w.out, block.outs);
  // Reduce the rows of a block until every processor has a block.
  while (product->columns * ceil_div(matmul.rows, block.rows) < processors() && block.rows > 64) {
    block.rows = ceil_div(block.rows, 64) * 32;
  }
  product->items = product->columns * ceil_div(matmul.rows, block.rows);

  if (prologue.kind || variant->packed_bytes(matmul)) {
    const Pack pack = {matmul, prologue, variant, product->packed->get()};
    if (const int64_t items = ceil_div(matmul.rows, kPackRows); items == 1) {
      pack(0);
    } else {
      const auto packing = std::make_shared<Packing>(pack);
      packing->items = items;
      run(packing, matmul.rows * matmul.w.inner * (prologue.kind ? 8 : 4));
    }
  }
  run(product, matmul.rows * matmul.w.out * matmul.w.inner);
}

bool is_zero(const char* bytes, int64_t count) {
  constexpr int64_t kSome = 64;
  for (; count >= kSome; bytes += kSome, count -= kSome) {
    uint64_t words[kSome / 8], any = 0;
    memcpy(words, bytes, kSome);
    for (const uint64_t word : words) any |= word;
    if (any) return false;
  }
  return std::all_of(bytes, bytes + count, [](char byte) { return byte == 0; });
}

// Skips the rows of zeros at the beginning and at the end, which are a step's padding, and writes their results: the residual, or
// zeros.
void leave_out_padding(Matmul& m, Prologue& prologue, Residual& residual) {
  const int64_t x_bytes = m.w.inner * (m.x_bfloat16 ? 2 : 4) * (prologue.kind == Prologue::kSwiglu ? 2 : 1);
  const int64_t y_bytes = m.w.out * (m.y_bfloat16 ? 2 : 4);
  const auto* x = static_cast<const char*>(prologue.x);
  const auto* r = static_cast<const char*>(residual.numbers);
  auto* y = static_cast<char*>(m.y);
  const auto leave_out = [&](int64_t row, int64_t rows) {
    r ? memcpy(y + row * y_bytes, r + row * y_bytes, rows * y_bytes) : memset(y + row * y_bytes, 0, rows * y_bytes);
  };
  int64_t first = 0, end = m.rows;
  while (end > 0 && is_zero(x + (end - 1) * x_bytes, x_bytes)) --end;
  while (first < end && is_zero(x + first * x_bytes, x_bytes)) ++first;
  leave_out(0, first);
  leave_out(end, m.rows - end);
  m.rows = end - first;
  m.x = prologue.x = x + first * x_bytes;
  m.y = y + first * y_bytes;
  residual.numbers = r ? r + first * y_bytes : nullptr;
}

bool is_number(ffi::DataType type) { return type == ffi::BF16 || type == ffi::F32; }

bool is_matrix(const ffi::AnyBuffer& buffer, int64_t rows) {
  return buffer.dimensions().size() == 2 && buffer.dimensions()[0] == rows;
}

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("matmul: " + what); }

// Stores the scales and zeros of a quantised weight, which are the first `count` operands of `rest`.
ffi::Error add_scales(Weight& w, const ffi::RemainingArgs& rest, size_t count) {
  if (count != 1 && count != 2) return invalid("codes need one matrix of scales, and may have one of zeros");
  for (size_t i = 0; i < count; ++i) {
    const auto numbers = rest.get<ffi::AnyBuffer>(i);
    if (!numbers.has_value() || !is_matrix(*numbers, w.out) || !is_number(numbers->element_type())) {
      return invalid("scales and zeros must be matrices of bfloat16 or float32 with a row for each output");
    }
    (i ? w.zeros : w.scales) = numbers->untyped_data();
    (i ? w.wide_zeros : w.wide_scales) = numbers->element_type() == ffi::F32;
    const int64_t groups = numbers->dimensions()[1];
    if (groups == 0 || w.inner % groups || (i && groups != w.groups)) return invalid("the number of groups must divide the inputs, and be equal for scales and zeros");
    w.groups = groups;
    w.group = w.inner / groups;
  }
  if (w.groups > 1 && w.group % kStep) return invalid("groups must be multiples of " + std::to_string(kStep));
  return ffi::Error::Success();
}

// Stores the deferred operation on x. A norm's weight is the operand `at` of `rest`.
ffi::Error add_prologue(Prologue& p, std::string_view name, float eps, int64_t parts, const ffi::AnyBuffer& x,
                        const ffi::RemainingArgs& rest, size_t at, int64_t inner) {
  p.x = x.untyped_data();
  p.eps = eps;
  p.parts = parts;
  p.kind = name == "norm" ? Prologue::kNorm : name == "swiglu" ? Prologue::kSwiglu : Prologue::kNone;
  if (p.kind == Prologue::kNone && !name.empty()) return invalid("unknown prologue " + std::string(name) + ": choose from norm, swiglu");
  if (x.dimensions()[1] != inner * (p.kind == Prologue::kSwiglu ? 2 : 1)) return invalid("x must have as many inputs as the weight");
  if (parts < 1 || inner % parts) return invalid("the parts of x must be equal");
  if (p.kind != Prologue::kNorm) return ffi::Error::Success();
  const auto weight = rest.get<ffi::AnyBuffer>(at);
  if (!weight.has_value() || weight->element_type() != x.element_type() || weight->element_count() != size_t(inner)) {
    return invalid("a norm needs a weight [inputs] with the dtype of x");
  }
  p.weight = weight->untyped_data();
  return ffi::Error::Success();
}

// Stores the residual, which is the last operand of `rest`.
ffi::Error add_residual(Residual& r, const ffi::AnyBuffer& y, const ffi::RemainingArgs& rest) {
  const auto numbers = rest.get<ffi::AnyBuffer>(rest.size() - 1);
  if (!numbers.has_value() || numbers->element_type() != y.element_type() || !is_matrix(*numbers, y.dimensions()[0]) ||
      numbers->dimensions()[1] != y.dimensions()[1]) {
    return invalid("the residual must have the shape and dtype of the product");
  }
  r.numbers = numbers->untyped_data();
  return ffi::Error::Success();
}

// Computes y = x * w transposed. `rest` has, as far as they exist, the scales and zeros of codes, the weight of a norm, and the
// residual.
ffi::Error matmul(ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, int64_t bits,
                  std::string_view variant, std::string_view prologue, float eps, int64_t parts, bool adds) {
  if (x.dimensions().size() != 2 || w.dimensions().size() != 2) return invalid("operands must be matrices");
  const int64_t rows = x.dimensions()[0], out = w.dimensions()[0];
  const int64_t inner = bits == 16 ? w.dimensions()[1] : x.dimensions()[1] / (prologue == "swiglu" ? 2 : 1);
  if (!is_number(x.element_type()) || !is_number(y->element_type())) return invalid("x and the product must be bfloat16 or float32");
  const bool bfloat16 = x.element_type() == ffi::BF16;
  const int64_t units = ceil_div(inner, kUnitSteps * kStep) * kUnitSteps * kStep;
  const int64_t per_row = bits == 16 || bits == 8 ? inner : bits == 4 ? ceil_div(inner, 128) * 64 : units * 3 / 8;
  if (bits != 16 && bits != 8 && bits != 4 && bits != 3) return invalid("weights must have 16, 8, 4 or 3 bits, not " + std::to_string(bits));
  if (w.element_type() != (bits == 16 ? ffi::BF16 : ffi::U8) || w.dimensions()[1] != per_row) {
    return invalid("the weight must have the dtype and the row size of " + std::to_string(bits) + " bits");
  }
  Matmul m = {};
  m.w.data = static_cast<const uint8_t*>(w.untyped_data());
  m.w.bits = static_cast<int>(bits);
  m.w.out = out;
  m.w.inner = m.w.group = inner;
  m.w.groups = 1;
  m.w.row_bytes = per_row * (bits == 16 ? 2 : 1);
  const size_t others = (prologue == "norm") + adds;
  if (rest.size() < others) return invalid("an operand is missing");
  if (bits != 16) {
    auto error = add_scales(m.w, rest, rest.size() - others);
    if (error.failure()) return error;
  }
  Prologue first;
  auto error = add_prologue(first, prologue, eps, parts, x, rest, rest.size() - others, inner);
  if (error.failure()) return error;
  Residual residual;
  if (adds) error = add_residual(residual, *y, rest);
  if (error.failure()) return error;
  m.x = x.untyped_data();
  m.y = y->untyped_data();
  m.x_bfloat16 = bfloat16;
  m.y_bfloat16 = y->element_type() == ffi::BF16;
  m.rows = rows;
  leave_out_padding(m, first, residual);
  const Multiplier* multiplier = choose(variant, bfloat16, m.rows, m.w);
  if (multiplier == nullptr) return invalid("this machine has no variant " + std::string(variant) + " for this dtype");
  if (m.rows) multiply_all(m, first, residual, multiplier);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxserve

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_matmul, jaxserve::matmul,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<std::string_view>("variant")
                                  .Attr<std::string_view>("prologue")
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("parts")
                                  .Attr<bool>("adds"));

// Sets the maximum number of threads of a call: core.machine.processors, which respects affinity and control groups.
extern "C" void jaxserve_set_processors(int64_t count) { jaxserve::processor_count = std::max<int64_t>(1, count); }

// Returns the maximum number of threads of a call.
extern "C" int64_t jaxserve_processors() { return jaxserve::processors(); }

// Returns whether the named variant may multiply rows of bfloat16 by a weight of `bits` bits.
extern "C" bool jaxserve_has_matmul(const char* name, size_t length, int64_t bits) {
  jaxserve::Weight weight = {};
  weight.bits = static_cast<int>(bits);
  return jaxserve::choose({name, length}, true, 1, weight) != nullptr;
}

// Prefers a variant for products of rows of bfloat16 with a kind of weights (choice.h). Returns false if it does not exist or is not
// one of those that were timed.
extern "C" bool jaxserve_prefer(const char* variant, int64_t bits, bool wide, int64_t rows) {
  return jaxserve::prefer(variant, static_cast<int>(bits), wide, rows);
}
