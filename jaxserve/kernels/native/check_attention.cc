// The check of attention (check.h).

#include "check.h"
#include "check_numbers.h"
#include "parallel.h"

namespace jaxserve {
namespace {

constexpr int64_t kHeads = 2, kPageSize = 8, kPages = 40, kUnlimited = int64_t{1} << 62;

// A tile, whose context ends with it, and the query heads of a kv head.
struct Problem {
  int64_t start, length, groups, window;
};
constexpr Problem kProblems[] = {
    {0, 1, 1, kUnlimited}, {130, 1, 7, kUnlimited}, {200, 1, 20, 70},  // decode rows
    {0, 30, 3, kUnlimited}, {101, 17, 4, kUnlimited}, {150, 23, 1, 40},
};

// A pool in two segments whose pages are scattered, and the numbers that it stands for.
class Context {
 public:
  Context(bool bfloat16, bool int8, int64_t dims, Random& random)
      : dims_(dims), row_bytes_(int8 ? dims + 4 : dims * (bfloat16 ? 2 : 4)), values_(kPages * kPageSize * kHeads * 2 * dims) {
    for (int32_t i = 0; i < kPages; ++i) table_.push_back(i * 7 % kPages);
    for (auto& segment : memory_) segment.resize(static_cast<size_t>(kPages / 2 * page_bytes()));
    segments_[0] = {0, memory_[0].data()};
    segments_[1] = {kPages / 2, memory_[1].data()};
    for (int64_t position = 0; position < kPages * kPageSize; ++position) {
      for (int64_t i = 0; i < 2 * kHeads; ++i) {
        char* const page = page_address(pages(), table_[static_cast<size_t>(position / kPageSize)]);
        put(page + (i * kPageSize + position % kPageSize) * row_bytes_, bfloat16, int8, &values_[index(position, i)], random);
      }
    }
  }

  Pages pages() const { return {segments_, 2, page_bytes()}; }
  const int32_t* table() const { return table_.data(); }
  const float* key(int64_t position, int64_t head) const { return &values_[index(position, 2 * head)]; }
  const float* value(int64_t position, int64_t head) const { return &values_[index(position, 2 * head + 1)]; }

 private:
  int64_t dims_, row_bytes_;
  std::vector<float> values_;  // [positions, heads, 2, dims]
  std::vector<char> memory_[2];
  std::vector<int32_t> table_;
  Segment segments_[2];

  int64_t page_bytes() const { return kHeads * 2 * kPageSize * row_bytes_; }
  size_t index(int64_t position, int64_t i) const { return static_cast<size_t>((position * 2 * kHeads + i) * dims_); }

  // Stores a random row, and writes the numbers that it stands for.
  void put(char* row, bool bfloat16, bool int8, float* values, Random& random) const {
    const float scale = int8 ? static_cast<float>(0.5 + random.uniform()) / 64 : 1;
    for (int64_t d = 0; d < dims_; ++d) {
      const float x = random.number();
      if (int8) {
        const auto code = static_cast<int8_t>(std::max(-127.0f, std::min(127.0f, std::nearbyint(x * 40))));
        row[d] = static_cast<char>(code);
        values[d] = static_cast<float>(code) * scale;
      } else if (bfloat16) {
        const uint16_t stored = to_bfloat16(x);
        memcpy(row + 2 * d, &stored, 2);
        values[d] = of_bfloat16(stored);
      } else {
        memcpy(row + 4 * d, &x, 4);
        values[d] = x;
      }
    }
    if (int8) memcpy(row + dims_, &scale, 4);
  }
};

// Computes the attention of a query over the positions [first, end).
std::vector<double> attention(const Context& context, int64_t head, const float* q, int64_t dims, double scale, int64_t first,
                              int64_t end) {
  std::vector<double> weights, out(static_cast<size_t>(dims));
  double top = -std::numeric_limits<double>::infinity(), total = 0;
  for (int64_t position = first; position < end; ++position) {
    double score = 0;
    for (int64_t d = 0; d < dims; ++d) score += static_cast<double>(q[d]) * context.key(position, head)[d];
    weights.push_back(score * scale);
    top = std::max(top, weights.back());
  }
  for (double& weight : weights) total += weight = std::exp(weight - top);
  for (int64_t position = first; position < end; ++position) {
    const double share = weights[static_cast<size_t>(position - first)] / total;
    for (int64_t d = 0; d < dims; ++d) out[static_cast<size_t>(d)] += share * context.value(position, head)[d];
  }
  return out;
}

void check_tile(Attend attend, const Supported& s, const Problem& p, int64_t dims, const Context& context, Random& random,
                Largest& errors) {
  const int64_t rows = p.length * kHeads * p.groups;
  Numbers q(rows * dims, s.bfloat16), out(rows * dims, s.bfloat16);
  std::vector<float> queries(static_cast<size_t>(rows * dims));
  for (size_t i = 0; i < queries.size(); ++i) queries[i] = q.set(static_cast<int64_t>(i), random.number());
  const int64_t row_size = s.int8 ? dims + 4 : dims;
  const auto scale = static_cast<float>(2 / std::sqrt(static_cast<double>(dims)));
  const Attention a = {q.data(), context.pages(), out.data(), s.bfloat16, s.int8, kHeads, p.groups, dims, kPageSize, row_size, scale, p.window};
  const Scratch scratch(scratch_floats(a, p.length) * sizeof(float));
  for (int64_t head = 0; head < kHeads; ++head) {
    const Tile tile = {0, p.start, p.length, context.table(), head};
    attend(a, tile, head == 0 ? &tile : nullptr, static_cast<float*>(scratch.get()));
    for (int64_t i = 0; i < p.length * p.groups; ++i) {
      const int64_t row = (i / p.groups * kHeads + head) * p.groups + i % p.groups, end = p.start + i / p.groups + 1;
      const auto exact = attention(context, head, &queries[static_cast<size_t>(row * dims)], dims, static_cast<double>(scale),
                                   std::max<int64_t>(0, end - p.window), end);
      for (int64_t d = 0; d < dims; ++d) {
        const double right = exact[static_cast<size_t>(d)], relative = s.bfloat16 ? kBfloat16 : 1e-5;
        errors.add(std::fabs(out.get(row * dims + d) - right), relative * std::fabs(right) + (s.rounded ? 2e-2 : s.bfloat16 ? 1e-3 : 2e-5));
      }
    }
  }
  errors.require(!out.overrun());
}

}  // namespace

double check_attention(Attend attend, const Supported& supported) {
  Random random(1);
  Largest errors;
  for (const int64_t dims : {80, 96, 128}) {
    if (dims % supported.multiple) continue;
    const Context context(supported.bfloat16, supported.int8, dims, random);
    for (const Problem& problem : kProblems) {
      if (supported.one_token && problem.length != 1) continue;
      check_tile(attend, supported, problem, dims, context, random, errors);
    }
  }
  return errors.share();
}

}  // namespace jaxserve
