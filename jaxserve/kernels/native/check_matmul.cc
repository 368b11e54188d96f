// The check of products (check.h).

#include "check.h"
#include "check_numbers.h"
#include "parallel.h"

namespace jaxserve {
namespace {

constexpr int64_t kRowCounts[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 50};  // around the edges of tiles and of methods
constexpr int64_t kMost = 50;

// A weight, and the values that its codes stand for. Odd numbers of outputs and inputs leave parts of tiles empty.
struct Shape {
  int64_t out, inner, group;
  bool zeros, wide;  // whether there are zeros; whether scales and zeros are float32
};
constexpr Shape kShapes[] = {{37, 544, 544, false, true}, {70, 100, 100, true, false}, {33, 768, 128, true, true}, {40, 320, 64, true, false}, {64, 256, 32, false, false}};

struct Stored {
  Weight w = {};
  std::vector<uint8_t> data;
  Numbers scales, zeros;
  std::vector<float> values;  // [out, inner]

  Stored(const Shape& shape, int bits, bool rounds, Random& random)
      : scales(shape.out * shape.inner / shape.group, !shape.wide), zeros(shape.out * shape.inner / shape.group, !shape.wide) {
    const int64_t inner = shape.inner, groups = inner / shape.group;
    const int64_t padded = (inner + 255) / 256 * 256;
    w.bits = bits;
    w.out = shape.out;
    w.inner = inner;
    w.row_bytes = bits == 16 ? 2 * inner : bits == 8 ? inner : bits == 4 ? (inner + 127) / 128 * 64 : padded * 3 / 8;
    w.group = bits == 16 ? inner : shape.group;
    w.groups = bits == 16 ? 1 : groups;
    w.wide_scales = w.wide_zeros = shape.wide;
    data.assign(static_cast<size_t>(shape.out * w.row_bytes), 0);
    values.resize(static_cast<size_t>(shape.out * inner));
    w.data = data.data();
    for (int64_t o = 0; o < shape.out; ++o) {
      uint8_t* const row = data.data() + o * w.row_bytes;
      for (int64_t i = 0; i < inner; ++i) {
        float& value = values[static_cast<size_t>(o * inner + i)];
        if (bits == 16) {
          const uint16_t stored = to_bfloat16(random.number());
          memcpy(row + 2 * i, &stored, 2);
          value = of_bfloat16(stored);
          continue;
        }
        const int64_t at = o * groups + i / shape.group;
        if (i % shape.group == 0) {
          scales.set(at, random.number() / static_cast<float>(1 << (bits - 1)));
          zeros.set(at, shape.zeros ? random.number() : 0);
        }
        const auto code = static_cast<int>(random.word() % (1u << bits));
        store(row, i, bits, code);
        value = scales.get(at) * (static_cast<float>(code - (1 << (bits - 1))) - (shape.zeros ? zeros.get(at) : 0));
        if (rounds) value = rounded_to_bfloat16(value);
      }
    }
    if (bits == 16) return;
    w.scales = scales.data();
    w.zeros = shape.zeros ? zeros.data() : nullptr;
  }

  // Stores the code of input i of a row, as jaxserve/quantization/packing.py defines it.
  static void store(uint8_t* row, int64_t i, int bits, int code) {
    const int64_t step = i / kStep, lane = i % kStep;
    if (bits == 8) {
      row[i] = static_cast<uint8_t>(code);
    } else if (bits == 4) {
      row[step / 4 * 64 + 2 * lane + step % 4 / 2] |= static_cast<uint8_t>(code << step % 2 * 4);
    } else {
      uint8_t* const unit = row + step / 8 * 96;
      unit[2 * lane + step % 8 / 4] |= static_cast<uint8_t>((code & 3) << step % 4 * 2);
      unit[64 + step % 8 * 4 + lane / 8] |= static_cast<uint8_t>(code >> 2 << lane % 8);
    }
  }
};

// Rounds a row of x to integers, in the segments of integers.h.
void round_row(const Weight& w, float* x) {
  int64_t segment = 4 * kStep;
  while (w.groups > 1 && w.group % segment) segment /= 2;
  for (int64_t first = 0; first < w.inner; first += segment) {
    const int64_t end = std::min(first + segment, w.inner);
    float largest = 0;
    for (int64_t i = first; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
    const float factor = 127 / largest, scale = largest * (1 / 127.0f);
    for (int64_t i = first; i < end; ++i) x[i] = std::nearbyint(x[i] * factor) * scale;
  }
}

void multiply(const Multiplier& variant, const Matmul& m) {
  const Scratch packed(variant.packed_bytes(m)), scratch(variant.scratch_bytes(m));
  for (int64_t row = 0; row < m.rows && variant.packed_bytes(m); row += kPackRows) variant.pack(m, row, packed.get());
  const Block size = variant.block(m);
  for (int64_t row = 0; row < m.rows; row += size.rows) {
    for (int64_t out = 0; out < m.w.out; out += size.outs) {
      const Block block = {out, std::min(size.outs, m.w.out - out), row, std::min(size.rows, m.rows - row)};
      variant.multiply(m, packed.get(), block, nullptr, scratch.get());
    }
  }
}

}  // namespace

double check_product(const Multiplier& variant, bool x_bfloat16, int bits, Rounded rounded) {
  Random random(static_cast<uint64_t>(bits));
  Largest errors;
  for (const Shape& shape : kShapes) {
    Stored weight(shape, bits, rounded.weight && bits != 16, random);
    Numbers x(kMost * shape.inner, x_bfloat16);
    std::vector<float> rows(static_cast<size_t>(kMost * shape.inner));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = x.set(static_cast<int64_t>(i), random.number());
    std::vector<double> exact, size;
    for (int64_t r = 0; r < kMost; ++r) {
      float* const row = rows.data() + r * shape.inner;
      if (rounded.x && bits != 16 && x_bfloat16) round_row(weight.w, row);
      for (int64_t o = 0; o < shape.out; ++o) {
        double sum = 0, squares = 0;
        for (int64_t i = 0; i < shape.inner; ++i) {
          const double term = static_cast<double>(row[i]) * weight.values[static_cast<size_t>(o * shape.inner + i)];
          sum += term;
          squares += term * term;
        }
        exact.push_back(sum);
        size.push_back(std::sqrt(squares));
      }
    }
    // A weight of 8 bits may become either of its neighbours in bfloat16.
    const double allowed = rounded.weight && bits == 8 ? 5e-3 : 1e-4;
    for (const int64_t count : kRowCounts) {
      const bool y_bfloat16 = x_bfloat16 && count % 2 == 0;
      Numbers y(count * shape.out, y_bfloat16);
      multiply(variant, {x.data(), y.data(), x_bfloat16, y_bfloat16, count, weight.w});
      for (int64_t i = 0; i < count * shape.out; ++i) {
        const double right = exact[static_cast<size_t>(i)], limit = allowed * size[static_cast<size_t>(i)];
        errors.add(std::fabs(y.get(i) - right), limit + (y_bfloat16 ? kBfloat16 * std::fabs(right) : 0));
      }
      errors.require(!y.overrun());
    }
  }
  return errors.share();
}

}  // namespace jaxserve
