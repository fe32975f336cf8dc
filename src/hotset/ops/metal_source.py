"""The Metal kernel of `route_shed` as text: one thread per row. Handed to MLX by `hotset.ops.mlx_backend`.

Knows nothing of MLX, so that the tests can compile it as C++ and compare it with the reference where there is no Mac.
Contract: `hotset.ops.contract`.
"""

METAL_BODY = """
    uint t = thread_position_in_grid.x;
    uint base = t * R;
    uint num_experts = slot_table_shape[0];
    float sum_all = 0.0f, sum_kept = 0.0f;
    int first = -1;
    uint misses = 0;
    for (uint r = 0; r < R; ++r) {
        long expert = long(indices[base + r]);
        float score = scores[base + r];
        int slot = (expert >= 0 && expert < long(num_experts)) ? slot_table[expert] : -1;
        sum_all = sum_all + score;
        if (slot >= 0) {
            sum_kept = sum_kept + score;
            if (first < 0) first = slot;
        } else {
            // insertion: before every smaller number, NaN after every number; equal scores stay in order.
            // "Is NaN" is asked of the bits, so that it survives a compiler that assumes there is none
            bool is_nan = (as_type<uint>(score) & 0x7FFFFFFFu) > 0x7F800000u;
            uint place = misses;
            while (place > 0) {
                float before = miss_scores[base + place - 1];
                bool before_nan = (as_type<uint>(before) & 0x7FFFFFFFu) > 0x7F800000u;
                if (is_nan || (!before_nan && before >= score)) break;
                miss_scores[base + place] = before;
                miss_ids[base + place] = miss_ids[base + place - 1];
                --place;
            }
            miss_scores[base + place] = is_nan ? as_type<float>(0x7FC00000u) : score;
            long low = -2147483647L - 1L, high = 2147483647L;
            miss_ids[base + place] = int(expert < low ? low : (expert > high ? high : expert));
            ++misses;
        }
        slots[base + r] = uint(slot);
    }
    float ratio = (misses > 0 && sum_kept != 0.0f) ? metal::precise::divide(sum_all, sum_kept) : 1.0f;
    for (uint r = 0; r < R; ++r) {
        bool kept = int(slots[base + r]) >= 0;
        float share = scores[base + r] * ratio;
        bool is_nan = (as_type<uint>(share) & 0x7FFFFFFFu) > 0x7F800000u;
        mix[base + r] = kept ? (is_nan ? as_type<float>(0x7FC00000u) : share) : 0.0f;
        if (!kept) slots[base + r] = first < 0 ? 0u : uint(first);
        if (r >= misses) {
            miss_ids[base + r] = -1;
            miss_scores[base + r] = 0.0f;
        }
    }
"""
