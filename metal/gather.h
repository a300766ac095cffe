// What stands between gate and up and the way back of an expert.

template <int ACT, int ALPHA, int LIMIT>
METAL_FUNC float gated(const float g, const float up) {
  if (ACT != 2) return activate<ACT>(g) * up;
  // gpt-oss: both parts clipped, the gate from above alone
  // written out, since min and clamp would hide a NaN
  const float limit = as_type<float>(LIMIT), a = g > limit ? limit : g;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return (u + 1.0f) * (a / (1.0f + exp(-as_type<float>(ALPHA) * a)));
}
