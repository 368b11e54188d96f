// Kernels that are right, and the same with one small fault each. Prints the error of each one's check (check.h).

#include <cstdio>
#include <cstring>

#include "check.h"
#include "check_numbers.h"

using namespace jaxserve;

namespace {

// Changes a number of a result in float32 or bfloat16.
void spoil(void* numbers, int64_t index, bool bfloat16) {
  if (bfloat16) {
    static_cast<uint16_t*>(numbers)[index] = to_bfloat16(of_bfloat16(static_cast<uint16_t*>(numbers)[index]) * 1.1f + 0.1f);
  } else {
    float& x = static_cast<float*>(numbers)[index];
    x = x * 1.1f + 0.1f;
  }
}

bool beyond = false;  // whether faults are writes outside of the result instead of wrong numbers

void multiply(const Matmul& m, const void* packed, const Block& b, const Block* after, void* scratch) {
  kMatmulFloatBaseline.multiply(m, packed, b, after, scratch);
  if (m.rows == 17) spoil(m.y, beyond ? m.rows * m.w.out : 16 * m.w.out + m.w.out - 1, m.y_bfloat16);  // the first row after a tile
}

void attend(const Attention& a, const Tile& t, const Tile* after, float* scratch) {
  attend_baseline(a, t, after, scratch);
  if (t.head == 1 && t.length > 1) spoil(a.out, (t.length * a.kv_heads * a.groups - 1) * a.head_dim, a.bfloat16);  // the last token's
}

void norm(const void* x, const void* weight, float eps, int64_t size, bool bfloat16, void* to) {
  kRowsBaseline.norm(x, weight, eps, size, bfloat16, to);
  if (size % 16) spoil(to, size - 1, bfloat16);  // the rest of a vector
}

void quantize(const void* x, int64_t size, bool bfloat16, void* to) {
  kRowsBaseline.quantize(x, size, bfloat16, to);
  static_cast<int8_t*>(to)[size - 1] ^= 2;
}

int32_t draw(const DrawnRow& row, float* scratch) {
  const int32_t token = kDrawBaseline(row, scratch);
  return token > 1000 ? token - 1 : token;
}

void rate(const RatedRow& row) {
  kRateBaseline(row);
  if (row.top == 20) std::swap(row.top_ids[18], row.top_ids[19]);
}

void print(const char* name, double right, double broken) { printf("%s %g %g\n", name, right, broken); }

}  // namespace

int main() {
  Multiplier product = kMatmulFloatBaseline;
  product.multiply = multiply;
  RowFunctions first = kRowsBaseline, second = kRowsBaseline;
  first.norm = norm;
  second.quantize = quantize;
  const Supported queries = {true, false, 8, false, false}, codes = {false, true, 8, false, false};
  print("product", check_product(kMatmulFloatBaseline, true, 4, {}), check_product(product, true, 4, {}));
  print("attention", check_attention(attend_baseline, queries), check_attention(attend, queries));
  print("attention-over-codes", check_attention(attend_baseline, codes), check_attention(attend, codes));
  print("norm", check_rows(kRowsBaseline), check_rows(first));
  print("quantize", check_rows(kRowsBaseline), check_rows(second));
  print("draw", check_draw(kDrawBaseline), check_draw(draw));
  print("logprobs", check_rate(kRateBaseline), check_rate(rate));
  beyond = true;
  print("writes-beyond", 0, check_product(product, true, 16, {}));
}
