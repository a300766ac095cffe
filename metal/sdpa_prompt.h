// What kernels of attention for prompts share: rows, and keys or values in units of 8 elements.

#define EACH(i, n) UNROLL for (int i = 0; i < n; i++)

// A pair as words of T.
template <typename T>
METAL_FUNC void keep(const vec<typename Operand<T>::element, 2> a, thread uint* w) {
  w[0] = as_type<uint>(vec<T, 2>(T(a.x), T(a.y)));
}
// A bfloat is rounded in one addition, halves away from zero: where it is emulated, to even takes ten.
template <> METAL_FUNC void keep<bfloat>(const float2 a, thread uint* w) {
  const ushort2 x = as_type<ushort2>(as_type<uint>(a.x) + 0x8000), y = as_type<ushort2>(as_type<uint>(a.y) + 0x8000);
  w[0] = as_type<uint>(ushort2(x.y, y.y));
}
template <> METAL_FUNC void keep<float>(const float2 a, thread uint* w) {
  w[0] = as_type<uint>(a.x);
  w[1] = as_type<uint>(a.y);
}
#ifdef MSL_TENSOR_CORES
template <typename T> METAL_FUNC void keep(const uint a, thread uint* w) { w[0] = a; }
#endif

// k or v at a kv head: DIM plain T, or codes of fewer than 16 bits in groups of G; in units of 8 elements.
template <typename T, int FORM, int G, int DIM>
struct Units {
  static constexpr constant bool CODED = FORM < 16;
  // NW: words of a unit.
  static constexpr constant int BITS = CODED ? FORM : 8, B = CODED ? FORM : 8 * sizeof(T), NW = B / 4;
  const device uchar* data;
  const device uchar* scales;
  const device uchar* biases;
  int stride, scale_stride, bias_stride;  // in bytes

  template <bool WIDE>
  METAL_FUNC void load(const int key, const uint unit, thread uint* w, thread T* sb) const {
    if (unit * 8 >= DIM) return;
    const device uchar* p = data + (long)key * stride + unit * B;
    typedef const device conditional_t<CODED, uint, T>* At;
    EACH(i, (NW + 3) / 4) load_run<NW < 4 ? NW : 4, WIDE>((At)p + i * 16 / sizeof(T), w + 4 * i);
    if (CODED) {
      sb[0] = ((const device T*)(scales + (long)key * scale_stride))[unit * 8 / G];
      sb[1] = ((const device T*)(biases + (long)key * bias_stride))[unit * 8 / G];
    }
  }
  // In pairs of T.
  METAL_FUNC void pairs(const thread uint* w, const thread T* sb, const uint one, thread PAIR(T)* a) const {
    if (CODED) along<T, BITS, 8>(w, 0, float2(float(sb[0]), float(sb[1])), one, a);
    else EACH(i, 4) a[i] = pair_at<T>(w, i);
  }
};

// Row n of the kv head: rows of its heads at one position are neighbours.
METAL_FUNC Row prompt_row(const thread Place& at, const int n) {
  const int m = min(n, at.G * at.q_len - 1), i = m / at.G, end = at.len - at.q_len + i + 1;
  return {m % at.G, i, at.window ? max(0, end - at.window) : 0, at.causal ? end : at.len};
}

// numbers: scale, window (0: none), causal, keys of a chunk. The last rows of causal tiles have the
// most keys: they come first.
template <typename Ints, typename Floats>
METAL_FUNC Place prefill_place(
    const Ints q_shape, const Ints k_shape, const int len, const Floats numbers, const uint3 tg,
    const uint3 tgs, const uint sg, const uint lane) {
  const int Hkv = k_shape[1], G = q_shape[1] / Hkv, kv = tg.x % Hkv;
  return {int(tg.x) / Hkv, kv, kv * G, q_shape[1], G, q_shape[2], min(int(k_shape[2]), len), int(numbers[1]),
          int(tg.z), int(tgs.z), int(tgs.y - 1 - tg.y), int(simd_broadcast_first(sg)), int(lane), numbers[2]};
}

// Keys or values at the kv head of a threadgroup: plain, or codes with scales and biases.
template <typename In, typename A, typename Longs>
METAL_FUNC In units_at(const A a, const Longs steps, const thread Place& at) {
  return {(const device uchar*)(a + at.b * steps[0] + at.kv * steps[1]), nullptr, nullptr, int(steps[2] * sizeof(a[0])), 0, 0};
}
template <typename In, typename A, typename S, typename B, typename Longs>
METAL_FUNC In units_at(
    const A a, const Longs steps, const S s, const Longs s_steps, const B b, const Longs b_steps, const thread Place& at) {
  return {(const device uchar*)(a + at.b * steps[0] + at.kv * steps[1]), (const device uchar*)(s + at.b * s_steps[0] + at.kv * s_steps[1]),
          (const device uchar*)(b + at.b * b_steps[0] + at.kv * b_steps[1]), int(steps[2] * sizeof(a[0])),
          int(s_steps[2] * sizeof(s[0])), int(b_steps[2] * sizeof(b[0]))};
}
