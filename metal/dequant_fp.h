// mxfp4 and nvfp4 (e2m1 codes) and mxfp8 (e4m3 codes), 8 at a time, without a conversion: sign,
// exponent and mantissa move into a half's, whose bias makes it the value times 2^-14 or 2^-8.
constant constexpr bool AFFINE = false;

template <int bits>
METAL_FUNC constexpr int in_place() { return 8; }
template <int bits>
METAL_FUNC constexpr float unscale(int i) { return 1; }

METAL_FUNC uint one_bits(const int K) { return 0; }

// h[0..7] from codes 8j .. 8j+7 of the pack q.
template <int bits>
METAL_FUNC void decode8(const thread uint* q, const int j, const uint one, thread float* h) {
  if (bits == 4) {
    const uint u = q[j];
    halves(h, (u & 0x00070007) << 9 | (u & 0x00080008) << 12, 0, 4);
    halves(h, (u & 0x00700070) << 5 | (u & 0x00800080) << 8, 1, 5);
    halves(h, (u & 0x07000700) << 1 | (u & 0x08000800) << 4, 2, 6);
    halves(h, (u & 0x70007000) >> 3 | (u & 0x80008000), 3, 7);
  } else {
    UNROLL for (int k = 0; k < 2; k++) {
      const uint u = q[2 * j + k];
      halves(h, (u & 0x007f007f) << 7 | (u & 0x00800080) << 8, 4 * k, 4 * k + 2);
      halves(h, (u & 0x7f007f00) >> 1 | (u & 0x80008000), 4 * k + 1, 4 * k + 3);
    }
  }
}

// A group's scale as float, times what decode8 left out: an e4m3 byte for nvfp4's groups of 16
// (2^8 of its own and 2^14 of the codes), else an exponent; 2^14 and 2^8 go with 4 and 8 bits.
template <int group, int bits>
METAL_FUNC float group_scale(const uint8_t s) {
  if (group == 16) {
    const float f = float(as_type<half>(ushort((s & 0x7f) << 7))) * 4194304.0f;
    return s & 0x80 ? -f : f;
  }
  return as_type<float>(s == 0 ? 0x00400000u : uint(s) << 23) * (bits == 4 ? 16384.0f : 256.0f);
}
