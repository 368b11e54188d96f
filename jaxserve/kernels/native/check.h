// Checks of kernels on the machine that they are to serve on. Each computes small random problems, whose exact answers come from
// plain loops in double precision. check_call.cc has the list of checks; jaxserve/kernels/native/checks.py runs them in a process of
// their own, because a kernel that compilers or processors break may end the process, or never return.
//
// A check returns the kernel's largest error as a share of the error that is allowed. More than 1, or NaN, means that the kernel is
// wrong. It has written outside of its results if the error is infinite.

#pragma once

#include "attention.h"
#include "draw.h"
#include "logprobs.h"
#include "matmul.h"
#include "rounding.h"
#include "rows.h"

namespace jaxserve {

// How a variant of the product rounds its operands.
struct Rounded {
  bool x;       // x in bfloat16 becomes integers (integers.h) for products with codes
  bool weight;  // values of codes become bfloat16
};

double check_product(const Multiplier& variant, bool x_bfloat16, int bits, Rounded rounded);

// The problems that a kernel of attention supports.
struct Supported {
  bool bfloat16, int8;
  int64_t multiple;      // that divides head_dim
  bool one_token;        // decode rows alone
  bool rounded;          // whether weights or queries have fewer bits than bfloat16 queries have
};

double check_attention(Attend attend, const Supported& supported);
double check_rows(const RowFunctions& functions);
double check_draw(Draw draw);
double check_rate(Rate rate);
double check_rounding(RoundRows round);
double check_releasing();

}  // namespace jaxserve
