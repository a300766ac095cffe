// Shared by the decode-attention kernels. State of a set of keys for one row: o[DV] and sum,
// weighted by exp(score - max), and max, all fp32. No keys: (0, -inf, 0) in memory; in registers
// the max is LOWEST then, finite, so that no difference of two is NaN.
constant constexpr float LOG2E = 1.4426950408889634f, LOWEST = -3e38f;

// exp(a - b) for natural a and b.
METAL_FUNC float weight(const float a, const float b) { return fast::exp2((a - b) * LOG2E); }

// Two states of one row become one: what the first and the second are multiplied by, and their max.
METAL_FUNC float3 joined(const float first, const float second) {
  const float high = max(first, second);
  return float3(weight(first, high), weight(second, high), high);
}

// (factor of o, 1 / denominator) of a row whose keys have this max and sum. The sink joins the
// denominator once; a row that saw no key is 0.
template <bool SINKS>
METAL_FUNC float2 settle(const float top, const float sum, const float sink) {
  const float high = SINKS ? max(top, sink) : top, w = weight(top, high);
  const float all = SINKS ? fma(sum, w, weight(sink, high)) : sum * w;
  return float2(w, all == 0 ? 0 : 1 / all);
}
