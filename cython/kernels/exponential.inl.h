// The exponential that softmax and activations share: included after a vec_<isa>.h.
#pragma once

#include "half.h"

namespace {

// exp(x) = mantissa * 2^n with a mantissa around 1, and n + kRoundMagic.
struct Exponential {
  Vec mantissa;
  Vec magic;
};

// Cephes' polynomial for |x| <= 89. `multiply_add(a, b, c)` is a * b + c: rounded once where that is fastest, or twice
// where all instruction sets are to give the same bits.
template <class MultiplyAdd>
__attribute__((always_inline)) inline Exponential exponential(Vec x, MultiplyAdd multiply_add) {
  const Vec magic = multiply_add(x, broadcast(1.44269504f), broadcast(kRoundMagic));
  const Vec n = sub(magic, broadcast(kRoundMagic));
  Vec r = multiply_add(n, broadcast(-0.693359375f), x);  // ln 2 in two parts: n * the first is exact
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  return {add(multiply_add(p, mul(r, r), r), broadcast(1.0f)), magic};
}

}  // namespace
