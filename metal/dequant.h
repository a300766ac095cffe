// Affine codes (2, 3, 4, 5, 6, 8 bits), 8 at a time, without an int -> float conversion: a code is
// masked into the mantissa of a half. 0x6400 | c << s is the half 1024 + c * 2^s as long as
// c << s is below 1024, so codes stay where they are while they fit in 10 bits; x is divided by
// 2^s instead (exact), and 1024 is taken out once per pack through the sum of the divided x.
constant constexpr bool AFFINE = true;

template <int bits>
METAL_FUNC constexpr int in_place() { return 10 / bits; }
template <int bits>
METAL_FUNC constexpr float unscale(int i) { return 1.0f / (1 << bits * (i % in_place<bits>())); }

// The exponent bits of two halves of 1024. K is never negative, but a compiler can't know: it
// keeps the constant in a register instead of loading it before each use.
METAL_FUNC uint one_bits(const int K) { return K < 0 ? 0 : 0x64006400; }

// h[0..7] from codes 8j .. 8j+7 of the pack q.
template <int bits>
METAL_FUNC void decode8(const thread uint* q, const int j, const uint one, thread float* h) {
  if (bits == 4) {
    const uint u = q[j];
    halves(h, (u & 0x000f000f) | one, 0, 4);
    halves(h, (u & 0x00f000f0) | one, 1, 5);
    halves(h, (u >> 8 & 0x000f000f) | one, 2, 6);
    halves(h, (u >> 8 & 0x00f000f0) | one, 3, 7);
  } else if (bits == 8) {
    UNROLL for (int k = 0; k < 2; k++) {
      const uint u = q[2 * j + k];
      halves(h, (u & 0x00ff00ff) | one, 4 * k, 4 * k + 2);
      halves(h, (u >> 8 & 0x00ff00ff) | one, 4 * k + 1, 4 * k + 3);
    }
  } else {
    const int P = in_place<bits>();
    UNROLL for (int i = 0; i < 8; i++) {
      const int p = bits * (8 * j + i / P * P), a = p / 32, o = p % 32;
      uint t = q[a] >> o;
      if (o + bits * (i % P + 1) > 32) t |= q[a + 1] << (32 - o);
      t = (t & ((1u << bits) - 1) << bits * (i % P)) | (one & 0xffff);
      h[i] = float(as_type<half>(ushort(t)));
    }
  }
}

// A group's scale as float, times what decode8 left out.
template <int group, int bits, typename S>
METAL_FUNC float group_scale(const S s) { return float(s); }
