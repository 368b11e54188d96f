// The check of rounding (check.h).

#include "check.h"
#include "check_numbers.h"

namespace jaxserve {
namespace {

struct Shape {
  int64_t rows, size, group;
};

// Returns a code of a packed row, without its offset.
int code_at(const uint8_t* row, int64_t i, int bits) {
  if (bits == 8) return row[i] - 128;
  const int64_t unit = bits == 4 ? 128 : 256, plane = i % unit / 32, lane = i % 32;
  const uint8_t* from = row + i / unit * (bits == 4 ? 64 : 96);
  const int word = from[2 * lane] | from[2 * lane + 1] << 8;
  if (bits == 4) return (word >> 4 * plane & 15) - 8;
  return (word >> 2 * plane & 3) + 4 * (from[64 + 4 * plane + lane / 8] >> lane % 8 & 1) - 4;
}

// Returns how often the squared errors of a group's numbers count (quantization/scale_search.py).
std::vector<double> importance(const Numbers& w, int64_t first, int64_t group) {
  double squares = 0;
  for (int64_t i = first; i < first + group; ++i) squares += static_cast<double>(w.get(i)) * w.get(i);
  std::vector<double> found;
  for (int64_t i = first; i < first + group; ++i) {
    found.push_back(squares ? std::sqrt(1 + static_cast<double>(w.get(i)) * w.get(i) / (squares / static_cast<double>(group))) : 1);
  }
  return found;
}

// Returns the error of a group that is rounded by its extremes.
double plain_error(const Numbers& w, int64_t first, int64_t group, int bits, bool zeros) {
  const int low = -(1 << (bits - 1)), high = -low - 1;
  float extreme = 0, least = 0, most = 0;
  for (int64_t i = first; i < first + group; ++i) {
    const float x = w.get(i);
    if (std::fabs(x) > std::fabs(extreme)) extreme = x;
    least = std::min(least, x), most = std::max(most, x);
  }
  const float range = static_cast<float>(high - low);
  float scale = zeros ? (most - least) / range : bits == 8 ? std::fabs(extreme) / static_cast<float>(high) : extreme / static_cast<float>(low);
  scale = rounded_to_bfloat16(scale);
  if (scale == 0) scale = 1;
  const double zero = zeros ? std::nearbyint(-static_cast<double>(least) / static_cast<double>(scale)) + low : 0;
  const std::vector<double> h = importance(w, first, group);
  double sum = 0;
  for (int64_t i = first; i < first + group; ++i) {
    const double x = w.get(i), s = scale, step = std::clamp(std::nearbyint(x / s + zero), double(low), double(high)) - zero;
    sum += h[static_cast<size_t>(i - first)] * (x - step * s) * (x - step * s);
  }
  return sum;
}

// Checks that no group has more error than by its extremes, and that the search gains something in all.
void check_rows_of(RoundRows round, const Shape& shape, int bits, bool bfloat16, bool with_zeros, Random& random, Largest& errors) {
  const int64_t groups = shape.rows * shape.size / shape.group, units = bits == 4 ? 128 : 256;
  const int64_t row_bytes = bits == 8 ? shape.size : (shape.size + units - 1) / units * (bits == 4 ? 64 : 96);
  Numbers w(shape.rows * shape.size, bfloat16), codes((shape.rows * row_bytes + 1) / 2, true), scales(groups, true), zeros(groups, true);
  for (int64_t i = 0; i < shape.rows * shape.size; ++i) w.set(i, i < shape.group ? 0 : random.number());
  const RoundedRows rows = {w.data(), bfloat16, shape.rows, shape.size, shape.group, bits, static_cast<uint8_t*>(codes.data()),
                            static_cast<uint16_t*>(scales.data()), with_zeros ? static_cast<uint16_t*>(zeros.data()) : nullptr};
  std::vector<float> scratch(static_cast<size_t>(rounding_scratch_bytes(rows)) / 4 + 1);
  round(rows, scratch.data());
  double found = 0, plain = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * shape.group, row = first / shape.size;
    const double scale = scales.get(g), zero = with_zeros ? zeros.get(g) : 0;
    const std::vector<double> h = importance(w, first, shape.group);
    double sum = 0;
    for (int64_t i = first; i < first + shape.group; ++i) {
      const double off = w.get(i) - scale * (code_at(rows.codes + row * row_bytes, i % shape.size, bits) - zero);
      sum += h[static_cast<size_t>(i - first)] * off * off;
    }
    const double right = plain_error(w, first, shape.group, bits, with_zeros);
    errors.add(sum, right * 1.0001 + 1e-12);
    found += sum, plain += right;
  }
  if (bits < 8) errors.add(found, 0.98 * plain);
  errors.require(!codes.overrun() && !scales.overrun() && !zeros.overrun());
}

}  // namespace

double check_rounding(RoundRows round) {
  constexpr Shape kShapes[] = {{5, 96, 32}, {3, 512, 128}, {20, 300, 300}};
  Random random(5);
  Largest errors;
  for (const Shape& shape : kShapes) {
    for (const int bits : {8, 4, 3}) {
      for (const bool zeros : {false, true}) check_rows_of(round, shape, bits, bits == 4, zeros, random, errors);
    }
  }
  return errors.share();
}

}  // namespace jaxserve
