// Decode attention, matrix variant: a simdgroup takes 16 MANY keys at once for R = 8 NB query rows.
// Scores are K Q^T and the output O^T += V^T P^T: keys and elements of V are the rows of the first operand
// and come straight from memory or through a ring, query rows are the columns of the second. What a column gets does
// not depend on the other columns, on R or on W: a row has the same bits whatever q_len is.
//
// Codes are multiplied as they are. A group of a key of K gives scale * sum(c q) + bias * sum(q); a
// group of V takes p * scale in the place of p, and sum(p * bias) is added at the end.
// AHEAD: what a step needs is asked for a step before. Without, a lane has room for it in 128 registers.

template <typename T, int D, int DV, int KBITS, int KG, int VBITS, int VG, int R, int KP, int W,
          int CHUNK, int MANY, int MASK, bool SINKS, bool DIRECT, bool AHEAD, int MEM, int FOLD, bool RECENT = false>
struct SdpaMatrix {
  static constexpr constant int KB = KBITS < 16 ? KBITS : 8 * sizeof(T), VB = VBITS < 16 ? VBITS : 8 * sizeof(T);
  // Bits of the codes, if there are any.
  static constexpr constant int KC = KBITS < 16 ? KBITS : 8, VC = VBITS < 16 ? VBITS : 8;
  static constexpr constant int NB = R / 8;
  // Keys of a chunk, and tiles of 16 keys between two updates of the softmax.
  static constexpr constant int CHUNK_KEYS = CHUNK, UK = CHUNK % (16 * MANY * KP) == 0 ? MANY : 1, STEP = 16 * UK * KP;

  // Codes come through a ring where threadgroup memory holds three slots of it next to what a merge of R = 16 needs.
  static constexpr constant int WORDS = D * KB > DV * VB ? D * KB / 32 : DV * VB / 32;
  static constexpr constant int NG = D / KG > DV / VG ? D / KG : DV / VG, SLOT = 16 * UK * (WORDS + NG);
  static constexpr constant bool RING = AHEAD && KBITS < 16 && VBITS < 16 && sizeof(T) == 2 && 3 * KP * SLOT + KP * 224 <= 8192 &&
      D * KB % 256 == 0 && DV * VB % 256 == 0 && D / KG % 2 == 0 && DV / VG % 2 == 0;
  static constexpr constant int ST = 5 * KP * W * SLOT + KP * W * R * 14 <= 8192 ? 5 : 3;
  // Many long rows leave no registers for q, which all simdgroups of a row block read then.
  static constexpr constant bool SHARED = !AHEAD && KBITS == 16 && sizeof(T) == 2 && R * D >= 4096;
  static constexpr constant int SLOTS = RING ? KP * W * ST * SLOT : SHARED ? W * R * D / 2 : 0;

  // Few words of values come before keys are weighed, and not after.
  static constexpr constant bool SOON = UK * DV * VB <= 1024;

  // Two biases of K of a key are a pair of an operand, which meets their sums of q in three parts.
  static constexpr constant bool PAIRED = RING && D / KG == 2 && is_same_v<T, bfloat>;

  typedef Rows<T, KB, KG, D, 4, RING, RECENT> K;
  typedef Rows<T, VB, VG, DV, 8, RING, RECENT> V;
  typedef Ring<SdpaMatrix, K, V, UK, ST> Steps;
  typedef typename K::Operand KT;
  typedef typename V::Operand VT;
  typedef conditional_t<PAIRED, T, KT> BT;
  typedef Runs<CHUNK, FOLD> Chunks;
  // MEM is for heads of up to 128: longer ones were not timed with it.
  typedef Weights<NB, UK, VBITS < 16 && sizeof(T) == 2, !MASK> Soft;
  typedef Parts<DV, R, KP, W, V::RUN, RING ? DV / 16 : V::U, AHEAD || SHARED ? (DV <= 128 ? MEM / 4 : 8192) - SLOTS : 3072, SINKS, DIRECT, FOLD> Merge;

  // The first key of a simdgroup in a chunk, of which it takes 16 UK every STEP. A window leaves out whole
  // steps, so that steps begin at the same keys for every row.
  static METAL_FUNC int first_key(const thread Place& at, const int chunk) {
    const int c0 = chunk * CHUNK;
    return c0 + (at.window ? max(0, at.len - at.q_len - at.window + 1 - c0) / STEP * STEP : 0) + at.sg % KP * 16 * UK;
  }

  // The first chunk from `chunk` on that has keys for a row; runs that end before it are marked as empty.
  static METAL_FUNC int skip(const thread Place& at, int chunk, const int stride, const int row0, device float* ml) {
    for (; !DIRECT && chunk < at.chunks; chunk = Chunks::after(chunk, stride)) {
      if (first_key(at, chunk) - at.sg % KP * 16 * UK < min(at.len, (chunk + 1) * CHUNK)) break;
      const int n = row0 + at.sg % KP * 32 + at.lane;
      if (n < min(at.G * at.q_len, row0 + R) && Chunks::ends(chunk, at.chunks * CHUNK)) {
        const size_t c = state_at<FOLD>(at, n, chunk);
        ml[2 * c] = -INFINITY;
        ml[2 * c + 1] = 0;
      }
    }
    return chunk;
  }

  // The runs of FOLD chunks at.chunk, at.chunk + stride, ... of a threadgroup. o: [NB][DV / 16][4] as mma16 leaves
  // it, top (times log2(e)) and sum: [NB][2]. top: what sums are relative to.
  template <typename Mask, typename S, typename O>
  static METAL_FUNC void run(
      const device T* q, const int3 q_steps, const float q_scale, const thread K& k, const thread V& v,
      const bool wide, const Mask mask, const int4 mask_steps, const S sinks, device O* out, device float* ml,
      threadgroup float* part, threadgroup float* state, threadgroup uint4* ring, const thread Place& at, const int stride) {
    const int row = TILE_ROW(at.lane), col = TILE_COL(at.lane), row0 = (at.block + at.sg / KP) * R;
    const uint one = one_bits(at.q_len);
    // Minus the middle code of even and of odd elements of V.
    const float MIDDLE = 1 << (VC - 1), mid = -MIDDLE * unit<VT>(), odd = mid / unscale<VC>(1);
    PAIR(VT) middles[4];
    if (V::CODED) EACH(i, 4) middles[i] = once(i % 2 ? pair_of<VT>(odd, odd) : pair_of<VT>(mid, mid));
    uint kw[2 * UK * K::N * K::NW], vw[4 * UK * V::N * V::NW + 1], ks[4 * UK * K::NS], vs[4 * UK * V::NS];
    q += at.b * q_steps.x + at.head * q_steps.y;
    // Much is done to queries before they meet codes: they are asked for before keys.
    const int QW = D / 16 * sizeof(T);
    uint asked[K::CODED ? NB * QW : 1];
    if (K::CODED) EACH(n, NB) {
      const Row m = row_at(at, row0 + n * 8 + row);
      const device T* own = q + m.head * q_steps.y + m.i * q_steps.z + col * K::RUN;
      if (wide) load_query<K::RUN, D / 4, true>(own, asked + n * QW);
      else load_query<K::RUN, D / 4, false>(own, asked + n * QW);
    }
    // Keys behind the last are the last again: nothing behind it is read, and they have no weight.
    int chunk = skip(at, at.chunk * FOLD, stride, row0, ml);
    const int here = first_key(at, chunk);
    Steps steps = {};
    threadgroup uint* slots = (threadgroup uint*)ring + at.sg * (ST * SLOT);
    int slot = 0;
    if (RING) {
      steps.start(k, v, at, chunk, wide);
      EACH(i, ST / 2) {
        steps.next_keys(k, slots + 2 * i * SLOT, at, stride);
        steps.next_values(v, slots + (2 * i + 1) * SLOT);
      }
    } else if (AHEAD && chunk * CHUNK < at.len) {
      load_step<false, UK>(k, here, at.len, at.lane, wide, kw, ks);
      load_step<true, UK>(v, here, at.len, at.lane, wide, vw, vs);
    }
    // From here on `numbers` have come. The keys that all rows see:
    const float scale = q_scale * LOG2E;
    const int seen_from = at.window ? at.len - at.window : 0, seen_to = at.causal ? at.len - at.q_len + 1 : at.len;
    // The lane's two columns of each tile, and q in the order in which keys are held.
    Row c[NB * 2];
    PAIR(KT) qs[NB * D / 8];
    PAIR(VT) p[NB * 2 * UK];
    PAIR(BT) parts[NB];
    // Of a column: scale, with codes of K times the power of two that was taken out of q, and sum(q) of
    // each group.
    float scales[NB * 2], sums[NB * K::NG * 2];
    size_t seen[NB * 2];
    bool huge = false;
    EACH(i, NB * 2) {
      scales[i] = scale;
      c[i] = row_at(at, row0 + i / 2 * 8 + 2 * col + i % 2);
      c[i].to = max(c[i].to, c[i].from);
      seen[i] = at.b * (size_t)mask_steps.x + (at.head + c[i].head) * (size_t)mask_steps.y + c[i].i * (size_t)mask_steps.z;
    }
    EACH(n, NB) {
      const Row m = row_at(at, row0 + n * 8 + row);
      const device T* own = q + m.head * q_steps.y + m.i * q_steps.z + col * K::RUN;
      const device T* x = q + c[2 * n].head * q_steps.y + c[2 * n].i * q_steps.z + row / 2 * K::RUN;
      const device T* y = q + c[2 * n + 1].head * q_steps.y + c[2 * n + 1].i * q_steps.z + row / 2 * K::RUN;
      float v[K::N * K::RUN], fx = 1, fy = 1, mine = 1;
      if (K::CODED) {
        // A power of two brings the largest of a row between 2^15 and 2^16, so that halves hold it.
        float some[4] = {0, 0, 0, 0};
        EACH(i, D / 4) v[i] = scale_at<T>(asked + n * QW, i);
        EACH(i, D / 4) some[i % 4] = max(some[i % 4], fabs(v[i]));
        float big = max(max(some[0], some[1]), max(some[2], some[3]));
        big = max(big, simd_shuffle_xor(big, 1));
        big = max(big, simd_shuffle_xor(big, TILE_SIDE));
        const uint power = clamp(as_type<uint>(big) >> 23, 16u, 253u) << 23, inverse = 269u << 23;
        const uint px = simd_shuffle(power, TILE_LANE(2 * col)), py = simd_shuffle(power, TILE_LANE(2 * col + 1));
        mine = as_type<float>(inverse - power);
        fx = as_type<float>(inverse - px);
        fy = as_type<float>(inverse - py);
        huge = huge || max(px, py) > 227u << 23;
        scales[2 * n] = as_type<float>(px) * (scale * 3.0517578e-5f);
        scales[2 * n + 1] = as_type<float>(py) * (scale * 3.0517578e-5f);
      }
      const int A = 4 * K::RUN;
      thread PAIR(KT)* to = qs + n * (D / 8);
      if (K::CODED) EACH(i, K::N) code_columns<KT, KC, K::RUN>(v + i * K::RUN, x + i * A, y + i * A, mine, fx, fy, row, to + i * K::RUN / 2);
      else if (wide) EACH(i, K::N) load_columns<KT, KB, K::RUN, true>(own + i * A, x + i * A, y + i * A, row, to + i * K::RUN / 2);
      else EACH(i, K::N) load_columns<KT, KB, K::RUN, false>(own + i * A, x + i * A, y + i * A, row, to + i * K::RUN / 2);
      if (K::CODED) {
        const PAIR(KT) ones = pair_of<KT>(1.0f, 1.0f), back = pair_of<KT>(1 / unscale<KC>(1), 1 / unscale<KC>(1));
        EACH(g, K::NG) {
          float t[4] = {0, 0, 0, 0};
          const thread PAIR(KT)* b = qs + n * (D / 8) + g * (KG / 8);
          EACH(i, KG / 16) mma16<KT>(t, ones, ones, back, back, b[2 * i], b[2 * i + 1]);
          EACH(i, 2) sums[(n * K::NG + g) * 2 + i] = t[i] * unit<KT>();
        }
        if (PAIRED) {
          float x[2];
          EACH(i, 2) {
            const float all = row % 2 ? sums[4 * n + 2 + i] : sums[4 * n + i], high = float(T(all)), low = float(T(all - high));
            x[i] = row < 2 ? high : row < 4 ? low : row < 6 ? all - high - low : 0;
          }
          parts[n] = to_b<BT>(pair_of<BT>(x[0], x[1]));
        }
      }
    }
    threadgroup uint* shared = (threadgroup uint*)ring + at.sg / KP * (R * D / 2) + at.lane;
    if (SHARED) {
      if (at.sg % KP == 0) EACH(i, NB * D / 8) shared[i * 32] = word_of<KT>(qs[i]);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    // Scores of codes come times unit, which no float makes up for where q is huge.
    huge = simd_any(huge);
    float by[NB * 2];
    EACH(i, NB * 2) {
      if (K::CODED && !huge) scales[i] /= unit<KT>();
      by[i] = MASK ? 1.0f : scales[i];
    }
    for (bool again = false, first = true; chunk * CHUNK < at.len || (DIRECT && !again); chunk = Chunks::after(chunk, stride), again = true) {
      const int end = min(at.len, (chunk + 1) * CHUNK), begin = first_key(at, chunk);
      const int then = Chunks::after(chunk, stride), next = then * CHUNK < at.len ? first_key(at, then) : at.len;
      float o[NB * DV / 4], top[NB * 2], sum[NB * 2], bias[NB * V::NG * 2], middle[NB * V::NG * 4];
      EACH(i, NB * 2) top[i] = LOWEST;
      EACH(i, NB * 2) sum[i] = 0;
      EACH(i, NB * DV / 4) o[i] = 0;
      EACH(i, NB * V::NG * 2) bias[i] = 0;
      EACH(i, NB * V::NG * 4) middle[i] = 0;
      for (int key = begin; key < end; key += STEP) {
        // Plain: two sums of every other 16 elements each, for shorter chains of dependent multiplies.
        // Codes: one of each group, the other is the score.
        const int two = slot + SLOT == ST * SLOT ? 0 : slot + SLOT;
        if (RING) {
          // The slot of the values before is free now in all lanes.
          COPIES_WAIT(ST - 2);
          simdgroup_barrier(mem_flags::mem_threadgroup);
          steps.template words<K, false>(slots + slot, kw);
          steps.template scales<K>(slots + slot, ks);
          steps.next_keys(k, slots + (slot ? slot : ST * SLOT) - SLOT, at, stride);
        }
        if (!AHEAD) load_step<false, UK>(k, key, at.len, at.lane, wide, kw, ks);
        float s[NB * UK * 8];
        EACH(i, NB * UK * 8) s[i] = 0;
        if (PAIRED) EACH(i, UK * NB) {
          const thread uint* b = ks + i / NB * 4 * K::NS + K::NS;
          const PAIR(BT) x = pair_at<BT>(b, 0), y = pair_at<BT>(b + 2 * K::NS, 0);
          Steps::template mma8<BT>(s + i * 8, x, y, parts[i % NB]);
        }
        EACH(z, D / 4 / K::U * UK) {
          const int t = z % UK, u = z / UK, r = u * K::U / K::RUN, j = u % (K::RUN / K::U), g = r / K::PER;
          const thread uint* w = kw + (2 * t * K::N + r) * K::NW;
          thread float* mine = s + t * NB * 8;
          PAIR(KT) a[K::U];
          if (K::CODED) {
            codes_along<T, KC, K::U, KT>(w, j, a);
            codes_along<T, KC, K::U, KT>(w + K::N * K::NW, j, a + K::U / 2);
            if (u * K::U * 4 % KG == 0) {
              EACH(i, NB * 4) mine[i / 4 * 8 + 4 + i % 4] = 0;
            }
          } else {
            plain_along<KT, K::U>(w, j, a);
            plain_along<KT, K::U>(w + K::N * K::NW, j, a + K::U / 2);
          }
          EACH(i, K::U / 4) {
            const int x = u * (K::U / 4) + i;
            EACH(n, NB) {
              const int y = n * (D / 8) + 2 * x;
              mma16<KT>(mine + n * 8 + (K::CODED ? 1 : x % 2) * 4, a[2 * i], a[K::U / 2 + 2 * i], a[2 * i + 1], a[K::U / 2 + 2 * i + 1],
                        SHARED ? pair_of_word<KT>(shared[y * 32]) : qs[y], SHARED ? pair_of_word<KT>(shared[(y + 1) * 32]) : qs[y + 1]);
            }
          }
          if (K::CODED && (u + 1) * K::U * 4 % KG == 0) {
            EACH(i, NB * 4) {
              const thread uint* sb = ks + (2 * t + i % 4 / 2) * 2 * K::NS;
              thread float* x = mine + i / 4 * 8 + i % 4;
              if (!PAIRED) *x = fma(scale_at<T>(sb + K::NS, g), sums[(i / 4 * K::NG + g) * 2 + i % 2], *x);
              *x = fma(scale_at<T>(sb, g), x[4], *x);
            }
          }
        }
        // The next keys are on their way while these are weighted.
        const int after = key + STEP < end ? key + STEP : next;
        if (!AHEAD) load_step<true, UK>(v, key, at.len, at.lane, wide, vw, vs);
        else if (!RING && after < at.len) load_step<false, UK>(k, after, at.len, at.lane, wide, kw, ks);
        if (RING) {
          COPIES_WAIT(ST - 2);
          simdgroup_barrier(mem_flags::mem_threadgroup);
          if (SOON) steps.template words<V, true>(slots + two, vw);
          steps.template scales<V>(slots + two, vs);
          steps.next_values(v, slots + slot);
        }
        if (K::CODED && unit<KT>() < 1 && huge) EACH(i, NB * UK * 4) s[i / 4 * 8 + i % 4] /= unit<KT>();
        const int own = key + row;
        const bool whole = MASK || ((!at.window || key >= seen_from) && key + 16 * UK <= seen_to);
        EACH(i, NB * UK * 4) {
          const int e = i / 4 % NB * 2 + i % 2;
          thread float* x = s + i / 4 * 8 + i % 4;
          if (!K::CODED) *x += x[4];
          if (!MASK) continue;
          const int j = own + i / (4 * NB) * 16 + i % 4 / 2 * 8;
          if (uint(j - c[e].from) >= uint(c[e].to - c[e].from)) *x = -INFINITY;
          else *x = fma(added(mask[seen[e] + (size_t)j * mask_steps.w]), LOG2E, *x * scales[e]);
        }
        float most[2 * UK], all[NB * 2], mass[NB * 2], f[NB * 2];
        EACH(h, 2 * UK) {
          most[h] = Soft::SCALED ? fabs(scale_at<T>(vs + h * 2 * V::NS, 0)) : 1;
          if (Soft::SCALED) UNROLL for (int g = 1; g < V::NG; g++) most[h] = max(most[h], fabs(scale_at<T>(vs + h * 2 * V::NS, g)));
        }
        if (Soft::find(s, c, by, most, top, all, mass, own, whole, key == begin)) {
          Soft::follow(s, c, by, most, top, all, mass, f, own, whole);
          EACH(e, NB * 2) sum[e] = fma(sum[e], f[e], all[e]);
          if (key != begin) {
            EACH(i, NB * DV / 4) o[i] *= f[i / (DV / 4) * 2 + i % 2];
            EACH(i, NB * V::NG * 2) bias[i] *= f[i / (V::NG * 2) * 2 + i % 2];
            EACH(i, NB * V::NG * 4) middle[i] *= f[i / (V::NG * 4) * 2 + i % 2];
          }
        } else EACH(e, NB * 2) sum[e] += all[e];
        if (RING) {
          if (!SOON) steps.template words<V, true>(slots + two, vw);
          slot = two + SLOT == ST * SLOT ? 0 : two + SLOT;
        }
        EACH(u, DV / 8 / V::U) {
          const int r = u * V::U / V::RUN, j = u % (V::RUN / V::U), g = r / V::PER, L = V::N * V::NW;
          if (u == 0 || (V::CODED && u * V::U * 8 % VG == 0)) {
            EACH(t, UK) {
              float2 w[2] = {1, 1};
              EACH(h, 2 * V::CODED) {
                const thread uint* sb = vs + (2 * t + h) * 2 * V::NS;
                w[h] = float2(scale_at<T>(sb, g), scale_at<T>(sb + V::NS, g));
              }
              EACH(n, NB) {
                const thread float* x = s + (t * NB + n) * 8 + 4;
                thread PAIR(VT)* to = p + (t * NB + n) * 2;
                EACH(h, 2) to[h] = to_b<VT>(pair_of<VT>(x[2 * h] * w[h].x, x[2 * h + 1] * w[h].x));
                if (!V::CODED) continue;
                // Codes count from their middle, and its share is a bias: fewer digits of p are lost.
                thread float* b = bias + (n * V::NG + g) * 2;
                EACH(i, 4) b[i % 2] = fma(x[i], fma(w[i / 2].x, MIDDLE, w[i / 2].y), b[i % 2]);
                mma16<VT>(middle + (n * V::NG + g) * 4, middles[0], middles[1], middles[2], middles[3], to[0], to[1]);
              }
            }
          }
          EACH(t, UK) {
            PAIR(VT) a[2 * V::U];
            EACH(h, 2) {
              const thread uint* w = vw + (4 * t + 2 * h) * L + r * V::NW;
              if (RING) codes_of_pair<VC, VT>(vw[(2 * t + h) * V::N + r], a + h * V::U);
              else if (V::CODED) codes_across<T, VC, V::U, VT>(w, w + L, j, one, a + h * V::U);
              else across<VT, V::U>(w, w + L, j, a + h * V::U);
            }
            EACH(n, NB) {
              const thread PAIR(VT)* with = p + (t * NB + n) * 2;
              EACH(i, V::U / 2)
                mma16<VT>(o + n * (DV / 4) + u * V::U * 2 + 4 * i, a[2 * i], a[2 * i + 1], a[V::U + 2 * i],
                          a[V::U + 2 * i + 1], with[0], with[1]);
            }
          }
        }
        if (AHEAD && !RING && after < at.len) load_step<true, UK>(v, after, at.len, at.lane, wide, vw, vs);
      }
      if (V::CODED) {
        EACH(i, NB * V::NG * 2) bias[i] = rows_sum(bias[i]);
        EACH(i, NB * DV / 4) {
          const int n = i / (DV / 4), g = i % (DV / 4) * 4 / VG;
          const float by_unit = unscale<VC>(i / 2 % 2) / unit<VT>();
          o[i] = fma(o[i], by_unit, fma(middle[(n * V::NG + g) * 4 + i % 4], by_unit, bias[(n * V::NG + g) * 2 + i % 2]));
        }
      }
      EACH(i, NB * 2) sum[i] = rows_sum(sum[i]);
      if (again) threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool last = Chunks::ends(chunk, at.len);
      Merge::store(o, top, sum, part, state, sinks, out, ml, at, chunk, first, last);
      first = last;
    }
    // The rest of a run that was begun is no run of its own.
    if (chunk % FOLD) chunk = (chunk / FOLD + stride) * FOLD;
    skip(at, chunk, stride, row0, ml);
  }
};

//! kernel sdpa_matrix (q, k, v, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaMatrix<T, D, DV, 16, 64, 16, 64, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD, MEM, FOLD> X;
threadgroup float part[X::Merge::WORDS_USED];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::SLOTS ? X::SLOTS / 4 : 1];
const float scale = numbers[0];
const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
    q_shape, k_shape, LENS ? int(lens[ALONE ? 0 : threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    (const device uchar*)(k + at.b * k_strides[0] + at.kv * k_strides[1]), nullptr, nullptr, int(k_strides[2] * sizeof(k[0])), 0, 0, {}};
const typename X::V vr = {
    (const device uchar*)(v + at.b * v_strides[0] + at.kv * v_strides[1]), nullptr, nullptr, int(v_strides[2] * sizeof(v[0])), 0, 0, {}};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = (q_strides[3] == 1) & (k_strides[3] == 1) & (v_strides[3] == 1);
X::run(
    q, int3(q_strides[0], q_strides[1], q_strides[2]), rows ? scale : NAN, kr, vr,
    even(q, q_strides) & kr.even() & vr.even(), mask, MASK ? mask_steps(mask_shape, mask_strides) : int4(0),
    sinks, out, ml, part, state, ring, at, threadgroups_per_grid.y);

//! kernel sdpa_matrix_codes (q, k, ks, kb, v, vs, vb, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaMatrix<T, D, DV, KB, KG, VB, VG, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD, MEM, FOLD> X;
threadgroup float part[X::Merge::WORDS_USED];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::SLOTS ? X::SLOTS / 4 : 1];
const float scale = numbers[0];
const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
    q_shape, k_shape, LENS ? int(lens[ALONE ? 0 : threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    (const device uchar*)(k + at.b * k_strides[0] + at.kv * k_strides[1]), (const device uchar*)(ks + at.b * ks_strides[0] + at.kv * ks_strides[1]),
    (const device uchar*)(kb + at.b * kb_strides[0] + at.kv * kb_strides[1]), int(k_strides[2] * sizeof(k[0])), int(ks_strides[2] * sizeof(T)), int(kb_strides[2] * sizeof(T)), {}};
const typename X::V vr = {
    (const device uchar*)(v + at.b * v_strides[0] + at.kv * v_strides[1]), (const device uchar*)(vs + at.b * vs_strides[0] + at.kv * vs_strides[1]),
    (const device uchar*)(vb + at.b * vb_strides[0] + at.kv * vb_strides[1]), int(v_strides[2] * sizeof(v[0])), int(vs_strides[2] * sizeof(T)), int(vb_strides[2] * sizeof(T)), {}};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = (q_strides[3] == 1) & (k_strides[3] == 1) & (v_strides[3] == 1);
X::run(
    q, int3(q_strides[0], q_strides[1], q_strides[2]), rows ? scale : NAN, kr, vr,
    even(q, q_strides) & kr.even() & vr.even(), mask, MASK ? mask_steps(mask_shape, mask_strides) : int4(0),
    sinks, out, ml, part, state, ring, at, threadgroups_per_grid.y);
