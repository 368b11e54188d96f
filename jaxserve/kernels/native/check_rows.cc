// The checks of functions on rows, of drawing, of log-probabilities, and of giving memory back (check.h).

#include <numeric>

#include "check.h"
#include "check_numbers.h"
#include "os_pages.h"

namespace jaxserve {
namespace {

// -- functions on rows

constexpr int64_t kSizes[] = {1, 7, 16, 33, 64, 100, 515};

void check_elements(const RowFunctions& f, bool bfloat16, int64_t size, Random& random, Largest& errors) {
  Numbers x(size, bfloat16), y(size, bfloat16), normed(size, bfloat16), gated(size, bfloat16), sums(size, bfloat16);
  std::vector<double> sum(static_cast<size_t>(size));
  double squares = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double number = x.set(i, 2 * random.number());
    y.set(i, random.number());
    squares += number * number;
    sum[static_cast<size_t>(i)] = number + sums.set(i, random.number());
  }
  constexpr float kEps = 1e-5f;
  f.norm(x.data(), y.data(), kEps, size, bfloat16, normed.data());
  f.swiglu(x.data(), y.data(), size, bfloat16, gated.data());
  f.add(x.data(), size, bfloat16, sums.data());
  const double factor = 1 / std::sqrt(squares / static_cast<double>(size) + static_cast<double>(kEps));
  const double relative = bfloat16 ? kBfloat16 : 1e-5;
  const auto compare = [&](const Numbers& got, int64_t i, double right) {
    errors.add(std::fabs(got.get(i) - right), relative * std::fabs(right) + 1e-5);
  };
  for (int64_t i = 0; i < size; ++i) {
    const double gate = x.get(i), weight = y.get(i);
    compare(normed, i, gate * factor * weight);
    compare(gated, i, gate / (1 + std::exp(-gate)) * weight);
    compare(sums, i, sum[static_cast<size_t>(i)]);
  }
  errors.require(!normed.overrun() && !gated.overrun() && !sums.overrun());
}

void check_rotation(const RowFunctions& f, bool bfloat16, int64_t half, Random& random, Largest& errors) {
  Numbers x(2 * half, bfloat16), cos(half, false), sin(half, false), to(2 * half, bfloat16);
  for (int64_t i = 0; i < half; ++i) {
    const double angle = 6 * random.uniform();
    cos.set(i, static_cast<float>(std::cos(angle)));
    sin.set(i, static_cast<float>(std::sin(angle)));
    x.set(i, random.number());
    x.set(half + i, random.number());
  }
  f.rotate(x.data(), static_cast<float*>(cos.data()), static_cast<float*>(sin.data()), half, bfloat16, to.data());
  for (int64_t i = 0; i < half; ++i) {
    const double a = x.get(i), b = x.get(half + i), c = cos.get(i), s = sin.get(i), right[2] = {a * c - b * s, b * c + a * s};
    for (int part = 0; part < 2; ++part) {
      errors.add(std::fabs(to.get(part * half + i) - right[part]), (bfloat16 ? kBfloat16 : 1e-6) * std::fabs(right[part]) + 1e-6);
    }
  }
  errors.require(!to.overrun());
}

void check_quantization(const RowFunctions& f, bool bfloat16, int64_t size, Random& random, Largest& errors) {
  Numbers x(size, bfloat16), to(size + 4, true);  // more than the size + 4 bytes of the result
  float largest = 0, scale;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(x.set(i, random.number())));
  f.quantize(x.data(), size, bfloat16, to.data());
  const auto* codes = static_cast<const int8_t*>(to.data());
  memcpy(&scale, codes + size, sizeof(scale));
  errors.add(std::fabs(scale - largest / 127), 1e-6 * static_cast<double>(largest));
  for (int64_t i = 0; i < size; ++i) errors.add(std::fabs(codes[i] * scale - x.get(i)), 0.51 * static_cast<double>(scale));
  for (int64_t i = size + 4; i < 2 * (size + 4); ++i) errors.require(codes[i] == -1);
}

// -- drawing

struct Sampling {
  int32_t top_k;
  float top_p, min_p, temperature;
  bool adjusted;
};

// Returns the row's logits after penalties and biases, as sampling/ops.py defines them.
std::vector<double> adjusted(const DrawnRow& row) {
  std::vector<double> x(row.logits, row.logits + row.vocab);
  for (size_t i = 0; row.counts && i < x.size(); ++i) {
    const double repetition = row.seen[i] || row.counts[i] > 0 ? static_cast<double>(row.repetition) : 1;
    x[i] = (x[i] > 0 ? x[i] / repetition : x[i] * repetition) - static_cast<double>(row.frequency) * row.counts[i] -
           (row.counts[i] > 0 ? static_cast<double>(row.presence) : 0);
  }
  for (int64_t i = 0; i < row.biased && row.bias_ids[i] >= 0; ++i) x[static_cast<size_t>(row.bias_ids[i])] += static_cast<double>(row.biases[i]);
  return x;
}

// Returns the weights of the tokens that may be drawn.
std::vector<double> weights_of(const DrawnRow& row, const std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  std::vector<double> weights;
  for (const double logit : x) {
    const double weight = std::exp((logit - top) / static_cast<double>(row.temperature));
    weights.push_back(weight >= static_cast<double>(row.min_p) ? weight : 0);
  }
  std::vector<double> sorted = weights;
  std::sort(sorted.rbegin(), sorted.rend());
  if (row.top_k < row.vocab) sorted.resize(static_cast<size_t>(row.top_k));
  double left = static_cast<double>(row.top_p) * std::accumulate(sorted.begin(), sorted.end(), 0.0), lowest = 0;
  for (const double weight : sorted) {
    if (left <= 0) break;
    left -= lowest = weight;
  }
  for (double& weight : weights) weight = weight < lowest * (1 - 1e-6) ? 0 : weight;
  return weights;
}

// Checks that the running sum of weights reaches the uniform number's share of the total at the token.
void check_token(const DrawnRow& row, int32_t token, Largest& errors) {
  const std::vector<double> x = adjusted(row);
  errors.require(token >= 0 && token < row.vocab);
  if (token < 0 || token >= row.vocab) return;
  if (row.temperature == 0) return errors.require(x[static_cast<size_t>(token)] >= *std::max_element(x.begin(), x.end()) - 1e-4);
  const std::vector<double> weights = weights_of(row, x);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double before = std::accumulate(weights.begin(), weights.begin() + token, 0.0) / total;
  const double share = weights[static_cast<size_t>(token)] / total, uniform = static_cast<double>(row.uniform);
  errors.require(share > 0);
  errors.add(std::max({0.0, before - uniform, uniform - before - share}), 1e-4);
}

void check_drawing(Draw draw, int64_t vocab, const Sampling& sampling, Random& random, Largest& errors) {
  std::vector<float> logits(static_cast<size_t>(vocab)), scratch(static_cast<size_t>(draw_scratch_floats(vocab)));
  std::vector<uint8_t> seen(logits.size());
  std::vector<int32_t> counts(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = 3 * random.number();
    seen[i] = random.word() % 5 == 0;
    counts[i] = random.word() % 7 == 0 ? static_cast<int32_t>(random.word() % 4) : 0;
  }
  logits[static_cast<size_t>(vocab / 2)] = -std::numeric_limits<float>::infinity();  // a banned token
  const int32_t ids[] = {0, static_cast<int32_t>(vocab - 1), -1};
  const float biases[] = {2, -1, 0};
  DrawnRow row = {};
  row.logits = logits.data();
  row.vocab = vocab;
  row.repetition = 1;
  if (sampling.adjusted) {
    row.seen = reinterpret_cast<const bool*>(seen.data());
    row.counts = counts.data();
    row.bias_ids = ids;
    row.biases = biases;
    row.biased = 3;
    row.presence = 0.5f, row.frequency = 0.25f, row.repetition = 1.5f;
  }
  row.top_k = sampling.top_k ? std::min(sampling.top_k, static_cast<int32_t>(vocab)) : static_cast<int32_t>(vocab);
  row.top_p = sampling.top_p, row.min_p = sampling.min_p, row.temperature = sampling.temperature;
  for (int i = 0; i < 4; ++i) {
    row.uniform = static_cast<float>(random.uniform());
    check_token(row, draw(row, scratch.data()), errors);
  }
  logits[static_cast<size_t>(vocab - 1)] = std::nanf("");
  errors.require(draw(row, scratch.data()) == kNoToken);
}

// -- log-probabilities

void check_rating(Rate rate, int64_t vocab, int64_t top, Random& random, Largest& errors) {
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& logit : logits) logit = 3 * random.number();
  logits[0] = logits.back();  // equally likely
  const auto token = static_cast<int64_t>(random.word() % static_cast<uint64_t>(vocab));
  std::vector<int32_t> order(logits.size()), ids(static_cast<size_t>(top) + 1, -7);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
  double total = 0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit));
  const auto logprob_of = [&](int64_t i) { return static_cast<double>(logits[static_cast<size_t>(i)]) - std::log(total); };
  float logprob = 0;
  int32_t rank = 0, right_rank = 1;
  std::vector<float> logprobs(static_cast<size_t>(top) + 1, -7);
  rate({logits.data(), vocab, token, &logprob, &rank, top, ids.data(), logprobs.data()});
  for (const float logit : logits) right_rank += logit > logits[static_cast<size_t>(token)];
  errors.add(std::fabs(static_cast<double>(logprob) - logprob_of(token)), 1e-4);
  errors.require(rank == right_rank);
  for (size_t i = 0; i < static_cast<size_t>(top); ++i) {
    errors.require(ids[i] == order[i]);
    errors.add(std::fabs(static_cast<double>(logprobs[i]) - logprob_of(order[i])), 1e-4);
  }
  errors.require(ids.back() == -7 && logprobs.back() == -7);
}

}  // namespace

double check_rows(const RowFunctions& functions) {
  Random random(2);
  Largest errors;
  for (const bool bfloat16 : {false, true}) {
    for (const int64_t size : kSizes) {
      check_elements(functions, bfloat16, size, random, errors);
      check_rotation(functions, bfloat16, size, random, errors);
      check_quantization(functions, bfloat16, size, random, errors);
    }
  }
  return errors.share();
}

double check_draw(Draw draw) {
  constexpr Sampling kSamplings[] = {{0, 1, 0, 0, false},     {0, 1, 0, 1, false},      {40, 1, 0, 0.7f, false}, {0, 0.8f, 0, 1.3f, false},
                                     {0, 1, 0.05f, 1, false}, {20, 0.9f, 0, 1, true}, {0, 1, 0, 0, true}};
  Random random(3);
  Largest errors;
  for (const int64_t vocab : {3, 127, 1000, 4097}) {
    for (const Sampling& sampling : kSamplings) check_drawing(draw, vocab, sampling, random, errors);
  }
  return errors.share();
}

double check_rate(Rate rate) {
  Random random(4);
  Largest errors;
  for (const int64_t vocab : {3, 127, 1000, 4097}) {
    for (const int64_t top : {0, 1, 3, 20}) check_rating(rate, vocab, std::min(top, vocab), random, errors);
  }
  return errors.share();
}

// Memory that was given back reads as zeros.
double check_releasing() {
  Largest errors;
#if defined(__linux__)
  std::vector<char> memory(1 << 20, 1);
  const Range pages = whole_pages({memory.data(), memory.data() + memory.size()});
  errors.require(discard(pages) == 0);
  errors.require(std::all_of(pages.begin, pages.end, [](char byte) { return byte == 0; }));
#endif
  return errors.share();
}

}  // namespace jaxserve
