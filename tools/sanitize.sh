#!/usr/bin/env bash
# Run tests of all operators under the tools of NVIDIA's compute-sanitizer, a process for each group
# of tests below, several side by side. OPS is the benchmark binary of the operators.
#
#   tools/sanitize.sh OPS [TOOL...]      # memcheck racecheck synccheck initcheck
#
# A group has tests that launch each kernel of a family; most of the time compiles kernels. JOBS
# processes run at a time (all cores), on all GPUs, and what has not ended in LIMIT seconds (1200)
# is cut off or left out. ONLY, a regular expression, is matched with "TOOL GROUP" of what is run.
# OUT (sanitized) gets sanitizers.txt, a line for each group, tests.txt, which tests have passed,
# and errors.txt, what was reported.
set -uo pipefail
ops=$1
shift
tools=${*:-memcheck racecheck synccheck initcheck}
end=$(($(date +%s) + ${LIMIT:-1200}))
out=${OUT:-sanitized}
mkdir -p "$out"
rm -f "$out"/{sanitizers,tests,errors}.txt
logs=$(mktemp -d)
trap 'rm -r "$logs"' EXIT
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer | head -1)
"$sanitizer" --version | tail -1
gpus=$(nvidia-smi -L | wc -l)
export ops end out logs sanitizer gpus
# Paths may be relative.
[[ $ops == */* ]] || ops=./$ops

# The name of a group, and parts of the names of its tests. Those that take longest are first.
of_groups() {
  awk '{ tests[$1] = tests[$1] " " $2 } !seen[$1]++ { names[++count] = $1 }
    END { for (i = 1; i <= count; i++) print names[i] tests[names[i]] }' <<'GROUPS'
moe_fp4 moe_kernels::fp4_experts_of_any_size_give_exact_sums
moe_fp8 moe_kernels::fp8_experts_of_any_size_give_exact_sums
moe_dense moe_kernels::dense_experts_of_any_size_give_exact_sums
moe_shared moe_shared::a_token_has_the_same
moe_shared moe_shared::what_is_not_finite
moe_padding moe_shared::a_token_of_padding
linear_fp4 quant_linear::fp4_products_of_any_shape_are_exact
linear_fp8 quant_linear::fp8_products_of_any_shape_are_exact
linear_dense quant_linear::dense_products_of_any_shape_are_exact
linear_views quant_linear::x_may_be_any_view
linear_views quant_linear::weights_may_be_any_view
linear_views quant_linear::nothing_in_gives
linear_pair quant_linear_group::each_has
linear_pair quant_linear_group::the_pair_may_be
linear_codes quant_linear_codes::every_fp4_code
linear_codes quant_linear_codes::every_fp8_code
linear_codes quant_linear_codes::what_fills_up
grouped_linear grouped_linear::every_group_is_multiplied
grouped_linear_one grouped_linear::a_group_of_one
grouped_linear_nan grouped_linear::what_is_not
cached_prompts cached_attention::prompts_agree
cached_prompts cached_attention::more_queries_than
cached_attention cached_attention::queries_see_what
cached_attention cached_attention::rows_go_to
cached_attention cached_attention::queries_of_a_block
cached_attention cached_attention::a_vacant
sink_attention sink_attention::attention_agrees_with_the_oracle_at_every_size
sink_attention sink_attention::views_are
sink_tiles sink_attention::many_queries_of_16_bits
sink_tiles sink_attention::all_picks_in_order
small_m small_m_matmul::products_of_any_shape
small_m small_m_matmul::sums_are_made
small_m_rows small_m_rows::up_to_16
small_m_group small_m_group::each_of_a_group
small_m_tiles small_m_tiles::many_tiles
hyper_fused hyper_connection_fused::many_tokens_are
hyper_fused_token hyper_connection_fused::a_token_is
hyper_fused_views hyper_connection_fused::views
hyper_connection hyper_connection::coefficients_agree
hyper_connection hyper_connection::the_head_weighs
hyper_connection hyper_connection::expand_agrees
hyper_connection hyper_connection_kernels::a_token_does
hyper_connection hyper_connection_kernels::views
router_dense router_kernels::dense_router_takes_every_pair
router_dense router_kernels::dense_router_reads
router router::activation_topk_agrees
router router::hash_route_looks
router router::topk_select_agrees
router router_kernels::rows_of_a_wider
router router_kernels::dense_router_agrees
delta gated_delta::heads_of_128
delta gated_delta::values_and_pool
delta gated_delta_slots::padding_puts
delta gated_delta_states::every_intermediate
delta_kernels gated_delta_kernels::tokens_that_are_not
delta_kernels gated_delta_kernels::pools_and_values
delta_batches gated_delta_batches::every_sequence_of_a_large
delta_parts gated_delta_batches::parts_of_one
sampling sampling::top_k_keeps
sampling sampling::top_p_is_exact
sampling sampling_draws::tokens_are_those
sampling sampling_draws::a_vocabulary
sampling sampling_verify::greedy
sampling sampling_log_probs::log_probs_are
sampling sampling_penalties::logits_change
sampling sampling_lanes::a_lane_has
sampling sampling_recorded
topk topk::the_largest
topk topk_rows::hard_rows_together
topk topk_values::values_come
topk topk_windows::columns_are
topk topk_layouts::every_float
topk_large topk_large::widths_one
topk_large topk_large::more_candidates
topk_large topk_large::a_whole_vocabulary
attention attention::pooling_agrees
attention attention::a_block_has
attention attention::index_scores_agree
attention attention::rows_that_are_not_visible
compress_rows compress_rows::rows_of_complete
compress_rows compress_rows::positions_at_once
compress_rows store_step::every_part
compress_rows store_step::parts_may
flash_head flash_head::a_small_head
flash_head flash_head::candidates_are
flash_head flash_head::logits_of_all
flash_head flash_head::a_recorded
flash_head flash_head_draw::drawn_clusters
flash_head flash_head_build::clusters_have
matmul matmul::products_of_any_shape_equal
matmul matmul::f32_operands
matmul matmul::every_batch
moe moe::few_tokens_and_many
moe moe::groups_of_all_sizes
moe moe_routing::padding_adds
moe moe_routing::ids_may_have
markov markov::drafts_are
markov markov::a_lane_has
activations activations::rows_of_16
activations_small activations::products_of_small
activations_nan activations::what_is_not
activations_shared activations::a_shared_expert
sampling_split sampling_split::rows_of_all
sampling_split sampling_split::drafts_of_long
small_m_layouts small_m_layouts::both_operands
small_m_odd small_m_layouts::rows_of_odd
moe_large moe_large::thousands_of_tokens
moe_stages moe_large::hundreds_of_tokens
small rotation::the_last_channels
small rotation::positions_of_a_table
small norm::rows_of_any_length
small norm::views
small quant::every_fp8
small quant::fp8_blocks
small quant::fp4_matrices
small quant_roundtrip::fp8_values
small quant_roundtrip::fp4_values
small quant_roundtrip::the_hadamard
small readback::
small weights::a_linear_map_reads
small weights::experts_read
GROUPS
}

# Runs a group under a tool: TOOL GROUP TEST...
group() {
  local tool=$1 name=$2 start=$SECONDS log=$logs/$1-$2 left=$((end - $(date +%s) - 5)) code reports
  shift 2
  if ((left < 10)); then
    echo "$tool $name: not run" >>"$out/sanitizers.txt"
    return
  fi
  CUDA_VISIBLE_DEVICES=$((RANDOM % gpus)) DS4_REQUIRE=${DS4_REQUIRE:-cuda} \
    timeout -k 3 "$left" "$sanitizer" --tool "$tool" --print-limit 10 --error-exitcode 99 \
    "$ops" verify "$@" >"$log" 2>&1
  code=$?
  reports=$(grep -E ' SUMMARY' "$log" | sed 's/^=* //' | paste -sd';')
  [[ $code != 124 && $code != 137 ]] || reports='time ran out'
  echo "$tool $name: $(grep -c '^ok ' "$log") tests passed, $(grep -c '^FAILED' "$log") failed," \
    "$reports, exit code $code, $((SECONDS - start)) s" >>"$out/sanitizers.txt"
  # Each by one write: others append, too.
  echo "$tool $name"$'\n'"$(grep '^ok ' "$log")" >>"$out/tests.txt"
  [[ $code == 0 ]] ||
    echo "== $tool $name"$'\n'"$(grep -v '^ok ' "$log" | head -80)" >>"$out/errors.txt"
}
export -f group

for tool in $tools; do of_groups | sed "s/^/$tool /"; done | grep -E "${ONLY:-.}" |
  xargs -P "${JOBS:-$(nproc)}" -L 1 bash -c 'group "$@"' group
sort -o "$out/sanitizers.txt" "$out/sanitizers.txt"
for tool in $tools; do
  awk -v tool="$tool" '
    $1 != tool { next }
    / exit code 0,/ { clean++; tests += $3; next }
    / not run/ { left++; next }
    { other++ }
    END {
      printf "%s: %d groups clean (%d tests), %d not, %d not run\n", tool, clean, tests, other, left
    }' "$out/sanitizers.txt"
done
! grep -v ' exit code 0,' "$out/sanitizers.txt"
