// Runs kernels of the matrix unit on emulated tiles (emulated_tiles.h), and prints a line for each: its name, and numbers.
//
//   checked NAME ERROR            the largest error of its check, as a share of the allowed one (check.h)
//   integers BITS DIFFERENT       the number of random products with codes in which the integers of the matrix unit and those of
//                                 vectors (AVX2, from the native library) give different bits
//   errors SHAPE UNIT PAIRS VECTORS ROUNDED  the mean square error of attention against double precision: on the matrix unit, on
//                                 vectors of pairs of bfloat16, on vectors of float32, and of the exact answer in bfloat16

#include <cstdio>

#include "check.h"
#include "check_numbers.h"
#include "parallel.h"

using namespace jaxserve;

namespace {

// One tile of `length` tokens at the end of a context, of one kv head.
struct Shape {
  int64_t groups, dims, start, length, window;
};

// Random queries [length, groups, dims], keys and values [positions, dims].
struct Problem {
  Shape shape;
  int64_t positions, rows;
  Numbers q, pool;  // [1, 2, positions, dims]

  explicit Problem(const Shape& s)
      : shape(s), positions(s.start + s.length), rows(s.length * s.groups), q(rows * s.dims, true), pool(2 * positions * s.dims, true) {
    Random random(7);
    for (int64_t i = 0; i < rows * s.dims; ++i) q.set(i, random.number());
    for (int64_t i = 0; i < 2 * positions * s.dims; ++i) pool.set(i, random.number());
  }

  Numbers attend(Attend kernel) {
    Numbers out(rows * shape.dims, true);
    const Segment segment = {0, static_cast<char*>(pool.data())};
    const int32_t page = 0;
    const Attention a = {q.data(), {&segment, 1, 4 * positions * shape.dims}, out.data(), true, false, 1, shape.groups, shape.dims,
                         positions, shape.dims, 0.3f, shape.window};
    const Scratch scratch(scratch_floats(a, shape.length) * sizeof(float));
    kernel(a, {0, shape.start, shape.length, &page, 0}, nullptr, static_cast<float*>(scratch.get()));
    return out;
  }

  // Returns the attention of a row.
  std::vector<double> exact(int64_t row) const {
    const int64_t end = shape.start + row / shape.groups + 1, dims = shape.dims;
    std::vector<double> scores(static_cast<size_t>(end)), out(static_cast<size_t>(dims));
    double top = -1e300, total = 0;
    const int64_t first = std::max<int64_t>(0, end - shape.window);
    for (int64_t i = first; i < end; ++i) {
      double& score = scores[static_cast<size_t>(i)];
      for (int64_t d = 0; d < dims; ++d) score += static_cast<double>(q.get(row * dims + d)) * pool.get(i * dims + d);
      score *= static_cast<double>(0.3f);
      top = std::max(top, score);
    }
    for (int64_t i = first; i < end; ++i) total += scores[static_cast<size_t>(i)] = std::exp(scores[static_cast<size_t>(i)] - top);
    for (int64_t i = first; i < end; ++i) {
      for (int64_t d = 0; d < dims; ++d) {
        out[static_cast<size_t>(d)] += scores[static_cast<size_t>(i)] / total * static_cast<double>(pool.get((positions + i) * dims + d));
      }
    }
    return out;
  }
};

double square(double x) { return x * x; }

void compare(const Shape& shape) {
  Problem problem(shape);
  const Numbers results[] = {problem.attend(attend_amx), problem.attend(attend_avx512bf16), problem.attend(attend_avx512)};
  double errors[4] = {};
  const int64_t count = problem.rows * shape.dims;
  for (int64_t row = 0; row < problem.rows; ++row) {
    const std::vector<double> exact = problem.exact(row);
    for (int64_t d = 0; d < shape.dims; ++d) {
      const int64_t i = row * shape.dims + d;
      const double right = exact[static_cast<size_t>(d)];
      for (int kernel = 0; kernel < 3; ++kernel) errors[kernel] += square(results[kernel].get(i) - right);
      errors[3] += square(rounded_to_bfloat16(static_cast<float>(right)) - right);
    }
  }
  printf("errors G%d,D%d,window%d", static_cast<int>(shape.groups), static_cast<int>(shape.dims), static_cast<int>(shape.window));
  for (const double error : errors) printf(" %g", error / static_cast<double>(count));
  printf("\n");
}

void multiply(const Multiplier& variant, const Matmul& m) {
  const Scratch packed(variant.packed_bytes(m)), scratch(variant.scratch_bytes(m));
  for (int64_t row = 0; row < m.rows; row += kPackRows) variant.pack(m, row, packed.get());
  const Block size = variant.block(m);
  for (int64_t out = 0; out < m.w.out; out += size.outs) {
    variant.multiply(m, packed.get(), {out, std::min(size.outs, m.w.out - out), 0, m.rows}, nullptr, scratch.get());
  }
}

// Returns whether two variants give the same product of random operands: codes in groups of any size, with scales of both signs.
bool equal(const Multiplier& one, const Multiplier& other, int bits, Random& random) {
  const auto below = [&](uint64_t end) { return static_cast<int64_t>(random.word() % end); };
  constexpr int64_t kGroups[] = {32, 64, 96, 128, 160, 192, 256};
  Matmul m = {};
  Weight& w = m.w;
  const bool grouped = below(4) != 0, wide = below(2) != 0;
  m.rows = 1 + below(below(2) ? 20 : 70);
  m.x_bfloat16 = true;
  m.y_bfloat16 = below(2) != 0;
  w.bits = bits;
  w.out = 1 + below(below(2) ? 40 : 140);
  w.group = grouped ? kGroups[below(7)] : 1 + below(700);
  w.groups = grouped ? 1 + below(6) : 1;
  w.inner = w.group * w.groups;
  w.row_bytes = bits == 8 ? w.inner : bits == 4 ? (w.inner + 127) / 128 * 64 : (w.inner + 255) / 256 * 96;
  w.wide_scales = w.wide_zeros = wide;
  std::vector<uint8_t> data(static_cast<size_t>(w.out * w.row_bytes));
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.word());
  Numbers scales(w.out * w.groups, !wide), zeros(w.out * w.groups, !wide), x(m.rows * w.inner, true);
  for (int64_t i = 0; i < w.out * w.groups; ++i) {
    scales.set(i, random.number());
    zeros.set(i, random.number());
  }
  for (int64_t i = 0; i < m.rows * w.inner; ++i) x.set(i, random.number());
  w.data = data.data();
  w.scales = scales.data();
  w.zeros = below(2) ? zeros.data() : nullptr;
  m.x = x.data();
  const auto product_by = [&](const Multiplier& variant) {
    Numbers y(m.rows * w.out, m.y_bfloat16);
    m.y = y.data();
    multiply(variant, m);
    std::vector<float> values{y.overrun() ? 1.0f : 0.0f};
    for (int64_t i = 0; i < m.rows * w.out; ++i) values.push_back(y.get(i));
    return values;
  };
  return product_by(one) == product_by(other);
}

}  // namespace

int main() {
  printf("checked attention %g\n", check_attention(attend_amx, {true, false, 32, false, false}));
  printf("checked attention-of-pairs %g\n", check_attention(attend_avx512bf16, {true, false, 32, false, true}));
  for (const int bits : {16, 8, 4, 3}) printf("checked product%d %g\n", bits, check_product(kMatmulAmx, true, bits, {false, true}));
  for (const int bits : {8, 4, 3}) {
    printf("checked integers%d %g\n", bits, check_product(kMatmulAmxInt8, true, bits, {true, false}));
    Random random(11);
    int different = 0;
    for (int i = 0; i < 60; ++i) different += !equal(kMatmulAmxInt8, kMatmulAvx2, bits, random);
    printf("integers %d %d\n", bits, different);
  }
  for (const Shape& shape : {Shape{3, 64, 500, 32, 1 << 20}, {1, 128, 100, 32, 1 << 20}, {3, 64, 100, 32, 9}}) compare(shape);
}
