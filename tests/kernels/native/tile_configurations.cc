// Prints the 64 bytes that each kernel of the matrix unit has in memory when it loads its tile configuration, a line each.
//
// tests/kernels/test_matrix_unit.py links it with kernels in which a call of `captured` stands for the instruction, so that it runs
// on processors without a matrix unit. The kernels need AVX-512 to come that far; without it only `helper` is called.

#include <setjmp.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "attention.h"
#include "matmul.h"

namespace {

jmp_buf back;

void print(const char* name, void (*load)()) {
  printf("%s ", name);
  if (setjmp(back) == 0) load();
}

alignas(64) char memory[1 << 20];

void attend() {
  constexpr int64_t kDims = 32;
  static int32_t page = 0;
  const jaxserve::Segment segment = {0, memory};
  jaxserve::Attention a = {memory, {&segment, 1, 64 * kDims * 4}, memory, true, false, 1, 1, kDims, 64, kDims, 1, 64};
  const jaxserve::Tile tile = {0, 0, 1, &page, 0};
  static std::vector<float> scratch(jaxserve::scratch_floats(a, 1) + 64);
  jaxserve::attend_amx(a, tile, nullptr, scratch.data());
}

template <int64_t Rows>
void multiply() {
  jaxserve::Matmul m = {};
  m.x = m.y = memory;
  m.x_bfloat16 = m.y_bfloat16 = true;
  m.rows = Rows;
  m.w.data = reinterpret_cast<const uint8_t*>(memory);
  m.w.bits = 16;
  m.w.out = m.w.inner = m.w.group = 32;
  m.w.groups = 1;
  m.w.row_bytes = 64;
  jaxserve::kMatmulAmx.multiply(m, memory, {0, 32, 0, Rows}, nullptr, memory);
}

template <int64_t Group>
void multiply_codes() {
  static const std::vector<float> scales(64, 1.0f);
  jaxserve::Matmul m = {};
  m.x = m.y = memory;
  m.x_bfloat16 = m.y_bfloat16 = true;
  m.rows = 1;
  m.w = {reinterpret_cast<const uint8_t*>(memory), scales.data(), nullptr, true, false, 8, 32, 64, 64, Group, 64 / Group};
  jaxserve::kMatmulAmxInt8.multiply(m, memory, {0, 32, 0, 1}, nullptr, memory + (1 << 19));
}

}  // namespace

void load_in_helper();

extern "C" [[noreturn]] void captured(const void* config) {
  unsigned char bytes[64];
  memcpy(bytes, config, sizeof(bytes));
  for (const unsigned char byte : bytes) printf("%02x", byte);
  printf("\n");
  longjmp(back, 1);
}

int main() {
  print("helper", load_in_helper);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return 0;
  print("attention", attend);
  print("rows1", multiply<1>);
  print("rows17", multiply<17>);
  print("rows33", multiply<33>);
  print("integers32", multiply_codes<32>);
  print("integers64", multiply_codes<64>);
}
