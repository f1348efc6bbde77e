# ruff: noqa: E501 - a line of the table is a mutant
"""Each guard against ranks that lose step, and against failing and hostile servers, is removed once, and a test must fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.meta.mutate import copy_of_checkout, run_pytest
from tests.meta.warm_pytest import WarmPytest

PROTOCOL, ARRAYS, SERVER, REDIS = (
    f"src/bagua_ref/contrib/{name}.py" for name in ("cache/protocol", "cache/arrays", "cache/server", "utils/redis_store")
)
FAULTS = "tests/test_cache_faults.py"
SURVIVES = f"{FAULTS}::test_training_survives"
CACHE = [
    ("the length of lists", REDIS, " and len(answer) == count", "", f"{SURVIVES}[answer of the wrong shape: too few values]"),
    ("the kinds of values", REDIS, " and all(map(is_right, answer))", "", f"{SURVIVES}[answer of the wrong shape: integers]"),
    ("lists", REDIS, "isinstance(answer, list) and len", "len", f"{SURVIVES}[answer of the wrong shape: an integer]"),
    ("the longest list", PROTOCOL, "if count > self._limit.values:", "if False:", f"{SURVIVES}[foreign server: a list without an end]"),
    ("lists in lists", PROTOCOL, "[self._single(self._line()) for _ in", "[self._answer() for _ in", f"{SURVIVES}[answer of the wrong shape: a list in a list, 5000 deep]"),
    ("the longest line", PROTOCOL, ">= _LONGEST_LINE:", ">= 2**62:", f"{SURVIVES}[foreign server: a line without an end]"),
    ("numbers", PROTOCOL, 'not digits.removeprefix(b"-").isdigit() or', "", f"{SURVIVES}[answer of the wrong shape: a number that is none]"),
    ("the sizes of values", PROTOCOL, "if not 0 <= size <= _LONGEST_VALUE:", "if False:", f"{SURVIVES}[answer of the wrong shape: a value of negative length]"),
    ("the end of values", PROTOCOL, 'if self._arrived[end : end + 2] != b"\\r\\n":', "if False:", f"{SURVIVES}[answer of the wrong shape: a value without its end]"),
    ("the limit for the whole answer", PROTOCOL, "        left = self._until - time.monotonic()", "        left = self.seconds", f"{FAULTS}::test_a_byte_now_and_then_keeps_no_limit_alive"),
    ("the limit of a request that is sent", PROTOCOL, "                self._limit.left()\n", "", f"{FAULTS}::test_a_server_that_reads_too_slowly_is_given_up"),
    ("the limit of the limit", PROTOCOL, "min(self._until + size / _SLOWEST, self._latest)", "self._until + size / _SLOWEST", f"{FAULTS}::test_an_answer_that_keeps_coming_for_ever_is_given_up"),
    ("more time for more bytes", PROTOCOL, "size / _SLOWEST, self", "0, self", f"{FAULTS}::test_a_large_value_may_take_longer_than_the_timeout_if_it_keeps_coming"),
    ("arrays of elements without bytes", ARRAYS, "np.ndarray(shape, dtype, bytearray())", "np.empty(shape, dtype)", "property_tests/test_cache_codec.py::test_S8_3_a_hostile_value_runs_nothing_and_takes_memory_like_its_own_size"),
    ("the job's own port", SERVER, "heard != right and right.startswith(heard) and", "b'+PONG\\r\\n' not in heard and", f"{FAULTS}::test_what_listens_on_the_port_of_a_job_s_own_server_is_told_apart[noise]"),
]  # fmt: skip

ROUNDS, WRAPPED, ENGINE, COMPARISON, WAITING, DECENTRALIZED, ASYNC = (
    f"src/bagua_ref/{name}.py"
    for name in (
        "data_parallel/agreed_rounds", "data_parallel/wrapped_module", "scheduling/engine", "agreement/comparison",
        "communicators/waiting", "algorithms/decentralized", "algorithms/async_model_average",
    )
)  # fmt: skip
AGREE, LOST, WAITS = "tests/test_agreement.py", "tests/test_faults.py", "tests/test_waiting.py"
AGREEMENT = [
    ("comparing before a round", ROUNDS, "            training._bagua_backend.before_round = self._open\n", "            pass\n", f"{AGREE}::test_each_rank_says_the_same_and_names_who_differs_in_what"),
    ("optimizer steps", ROUNDS, "                facts.append(", "                str(", f"{AGREE}::test_each_rank_says_the_same_and_names_who_differs_in_what"),
    ("refusing to train on", ROUNDS, "        if self.broken:\n", "        if False:\n", f"{AGREE}::test_no_optimizer_uses_a_gradient_of_a_failed_round"),
    ("refusing to step", WRAPPED, "        self.rounds.check_usable()\n        self._functional", "        self._functional", f"{AGREE}::test_no_optimizer_uses_a_gradient_of_a_failed_round"),
    ("giving up a half-done round", WRAPPED, "            if self._bagua_backend.half_done:\n", "            if False:\n", "tests/test_training.py::test_training_goes_on_after_an_exception_in_backward_alone_or_resynchronized[2]"),
    ("telling the others", ROUNDS, "            self._group.abort(why)\n", "", f"{LOST}::test_a_backward_abandoned_half_way_is_an_error_on_all_ranks_at_once"),
    ("noting that a state was loaded", ROUNDS, "        self._loaded = True\n", "        pass\n", f"{LOST}::test_weights_that_one_rank_loads_are_an_error_where_replicas_are_equal"),
    ("comparing weights that were loaded", COMPARISON, "any(note[0] for note in self.check_facts())", "self.check_facts() is None", f"{LOST}::test_weights_that_one_rank_loads_are_an_error_where_replicas_are_equal"),
    ("running no bucket", ENGINE, "        if self._fate.error is None:\n            try:\n                self.done", "        if True:\n            try:\n                self.done", "tests/test_engine.py::test_no_bucket_runs_in_a_round_that_was_refused_or_after_it"),
    ("backward passes without a step", DECENTRALIZED, '            Fact("{has} run {value} backward passes since the last round", passes),\n', "", f"{LOST}::test_a_backward_without_a_step_is_an_error_where_steps_communicate"),
    ("the number of averages", DECENTRALIZED, '            Fact("{has} averaged weights {value} times", self._rounds),\n', "", f"{LOST}::test_checkpoints_of_different_steps_are_an_error_in_the_next_round"),
    ("leaving the warm-up", ASYNC, '            self.process_group.abort(f"it has', '            str(f"it has', f"{LOST}::test_a_rank_that_leaves_the_warm_up_early_does_not_make_the_others_wait"),
    ("ending waits of which none can end", WAITING, "            verdict = nobody_can_go_on(said)\n", "            pass\n", f"{WAITS}::test_ranks_that_wait_in_different_collectives_are_all_interrupted_with_the_same_words"),
    ("a collective that all have reached", WAITING, "if place and all(place in where[member] for member in members):", "if False:", f"{WAITS}::test_a_collective_that_all_have_reached_may_take_its_time"),
    ("a rank that trains on", WAITING, " or all(wait.is_background for wait in long.values())", "", f"{WAITS}::test_a_rank_whose_training_goes_on_beside_a_background_collective_does_not_count_as_waiting"),
    ("taking back a wait", WAITING, "                    self._publish([])\n", "                    pass\n", f"{WAITS}::test_a_wait_that_ends_is_taken_back_at_once"),
    ("comparing at the end of a round", ROUNDS, "            return check\n", "            return None\n", f"{AGREE}::test_each_rank_says_the_same_and_names_who_differs_in_what"),
    ("comparing at the end of a round, the engine's part", ENGINE, "                _Closing(self._opening, self._fate)()\n", "", f"{AGREE}::test_each_rank_says_the_same_and_names_who_differs_in_what"),
    ("other buckets than in the last round", ROUNDS, "            if not same_plan:", "            if False:", f"{LOST}::test_other_buckets_than_before_are_an_error_before_any_is_sent"),
    ("a wait that has timed out", WAITING, "            self._failed.append([what, place])\n", "", f"{WAITS}::test_a_wait_that_has_just_timed_out_is_still_known"),
    ("a wait shorter than five seconds", WAITING, ", timeout / 2)", ")", f"{WAITS}::test_a_wait_with_a_short_timeout_is_published_before_it_ends"),
    ("a verdict that has not been read yet", WAITING, "            said.append(self._verdict(store, self._published))\n", "", f"{WAITS}::test_a_connection_that_closes_because_none_could_go_on_is_known_for_that"),
    ("a store that does not answer", WAITING, "self._lock.acquire(timeout=_LIMIT)", "self._lock.acquire()", f"{WAITS}::test_a_store_that_does_not_answer_keeps_no_wait_from_ending"),
    ("who has left", WAITING, '                (self._store or self._job_store).set(f"waits/{self._rank}", _HAS_LEFT)\n', "                pass\n", f"{WAITS}::test_a_rank_that_has_left_never_comes"),
]  # fmt: skip
OP, DIFFERS = (
    "src/bagua_ref/comm_ops/decentralized.py",
    "tests/test_graphs.py::test_S13_4_a_function_that_differs_between_ranks_is_an_error_on_every_rank",
)
GRAPHS = [
    ("comparing graphs", OP, "        if differing:\n", "        if False:\n", f"{DIFFERS}[0-False-has other weights]"),
    ("comparing the order of sources", OP, "zlib.crc32(repr(graph).encode())", "zlib.crc32(repr(graph and [sorted(row) for row in graph]).encode())", f"{DIFFERS}[0-False-has another order]"),
    ("telling that a function failed", OP, "        except Exception as raised:\n", "        except MemoryError as raised:\n", f"{DIFFERS}[0-False-fails]"),
    ("comparing graphs on ranks that lead no node", "src/bagua_ref/bucket.py", "[1] if callable(peer_selection_mode) else None", "[1] if False else None", f"{DIFFERS}[3-True-has other weights]"),
]  # fmt: skip

FACTS, JOINING, SCALER = (
    f"src/bagua_ref/{name}.py" for name in ("agreement/facts", "data_parallel/joining", "data_parallel/grad_scaler")
)
UNEVEN, SKIPPING = "tests/test_uneven.py", "tests/test_grad_scaler.py"
JOIN = [
    ("saying nothing where there is no batch", FACTS, "            if note[place] != UNSAID:\n", "            if True:\n", f"{UNEVEN}::test_several_modules_may_train_at_different_rates"),
    ("saying whether a rank is inside join", ROUNDS, "0 if self.joining is None else self.joining.number", "0", f"{UNEVEN}::test_a_rank_outside_and_options_that_differ_are_errors_on_all_ranks"),
    ("comparing loaded weights with a joined rank's", ROUNDS, "        return Fact(_DIGEST, UNSAID) if", "        return self._digest() if", f"{UNEVEN}::test_weights_that_a_rank_loads_are_compared_with_those_of_ranks_that_have_batches"),
    ("telling the others of an exception", JOINING, '            joining.give_up(f"an', '            str(f"an', f"{UNEVEN}::test_an_exception_inside_ends_the_training_of_all_ranks"),
    ("a module in two contexts", JOINING, "        if training.rounds.joining is not None:\n            raise", "        if False:\n            raise", f"{UNEVEN}::test_a_module_is_in_one_context_at_a_time_and_in_none_after_an_error"),
    ("wrapping again inside join", JOINING, "        if context_of(training.module) is not training:\n", "        if False:\n", f"{UNEVEN}::test_wrapping_again_inside_is_an_error_on_leaving"),
    ("layers that communicate", JOINING, "            if isinstance(layer, torch.nn.SyncBatchNorm):\n", "            if False:\n", f"{UNEVEN}::test_layers_that_communicate_are_refused"),
    ("taking over counters", JOINING, "            algorithm.load_counters(counters)\n", "            pass\n", f"{UNEVEN}::test_it_equals_training_in_which_ranks_without_batches_have_a_loss_of_zero"),
    ("ending a warm-up together", ASYNC, "            self.context.end_join()\n", "", f"{UNEVEN}::test_async_ranks_finish_their_warm_up_together_and_then_train_alone"),
    ("a scaler that would be left behind", SCALER, "            if rounds.joining is not None and self not in rounds.joining.others:\n", "            if False:\n", f"{SKIPPING}::test_inside_join_a_scaler_must_be_listed"),
    ("skipping together", SCALER, "                    found.fill_(1)\n", "                    pass\n", f"{SKIPPING}::test_all_ranks_skip_a_step_in_which_one_overflows"),
]  # fmt: skip

LOCAL, VERSIONED, DILOCO, STATE = (
    f"src/bagua_ref/algorithms/{name}.py" for name in ("local_updates", "versioned_state", "diloco_impl", "diloco_state")
)
UPDATES = "tests/test_local_updates.py"
LOCAL_UPDATES = [
    ("steps that no backward preceded", LOCAL, "    steps_follow_backward = True\n", "", f"{UPDATES}::test_a_step_without_a_backward_counts_as_none"),
    ("backward passes without a local step", LOCAL, '            Fact("{has} run {value} backward passes since the last round", passes),\n', "", f"{UPDATES}::test_a_rank_that_skips_a_step_is_named"),
    ("comparing global weights when they are taken", DILOCO, "            self.context.note_load()  # g", "            pass  # g", f"{UPDATES}::test_weights_of_one_rank_that_change_before_the_local_phase_are_an_error_in_the_first_round"),
    ("comparing global weights that were loaded", VERSIONED, "        self.context.note_load()\n", "", f"{UPDATES}::test_global_state_that_differs_after_loading_is_an_error_in_the_next_round"),
    ("comparing outer optimizers that were loaded", DILOCO, "(g, [fragment.optimizer])", "(g, [])", f"{UPDATES}::test_global_state_that_differs_after_loading_is_an_error_in_the_next_round"),
    ("settings of outer optimizers", DILOCO, "            settings = fragment.settings(settings)\n", "            pass\n", f"{UPDATES}::test_outer_settings_that_differ_between_ranks_are_an_error_on_every_rank"),
    ("means that are not finite", DILOCO, "        if overflowed:\n", "        if False:\n", f"{UPDATES}::test_S9_5_a_mean_that_is_not_finite_is_an_error_on_every_rank_and_changes_nothing"),
    ("means that were lost", STATE, "        if self._missing:\n", "        if False:\n", f"{UPDATES}::test_a_mean_that_was_lost_is_not_applied_later"),
    ("training inside global_weights()", DILOCO, '        self._refuse_while_showing("an optimizer step")\n', "", f"{UPDATES}::test_training_inside_global_weights_is_refused"),
    ("comparing inside nodes first", ROUNDS, "                self._in_node.begin(facts, loaded).check(self._digest)\n", "", f"{UPDATES}::test_a_step_that_a_rank_of_a_node_skips_is_an_error_on_every_rank_of_every_node"),
]  # fmt: skip
FUSER, RUN, VERIFY = (f"src/bagua_ref/contrib/fuse/{name}.py" for name in ("fuser", "run", "verify"))
FUSE, VERDICTS = "tests/test_fuse.py", "tests/test_fuse_verdicts.py"
BITS, HONOURED = (
    f"{FUSE}::test_small_and_large_parameters_have_the_bits_of_step[Adam]",
    f"{FUSE}::test_attributes_of_parameters_are_honoured",
)
TRIED_WITH, SAVED = (
    f"{FUSE}::test_a_class_that_needs_an_attribute_is_tried_with_it",
    f"{FUSE}::test_a_weight_is_saved_alone_and_can_be_swapped",
)
FUSED = [
    ("large parameters staying where they are", FUSER, "[p for p in movable if p.numel() <= small and held_by_bucket(p) is not p]", "movable", BITS),
    ("the order of new state", FUSER, "            self._order(optimizer, stepped, plan)\n", "            pass\n", BITS),
    ("strings in state", FUSER, "next(in_order) if id(key) in places else key for key in keys]:", "*in_order]:", f"{FUSE}::test_state_under_strings_is_left_where_it_is[0]"),
    ("a copy of the state that a step changes", FUSER, "dict(run.state) for run", "run.state for run", f"{VERDICTS}::test_a_class_that_updates_each_element_by_itself_is_fused[Signs]"),
    ("attributes that have changed", FUSER, "(self._describe_weights(), self._attributes) == self._expected", "self._describe_weights() == self._expected[0]", HONOURED),
    ("attributes that differ", RUN, "parameter.requires_grad, own, state is None", "parameter.requires_grad, state is None", HONOURED),
    ("attributes of the flat parameter", RUN, "            setattr(self.flat, name, value)\n", "            pass\n", HONOURED),
    ("attributes that are tensors", RUN, "    if own is None or is_state_held", "    if is_state_held", HONOURED),
    ("attributes in a trial", VERIFY, "                setattr(parameters[-1], name, attribute)\n", "                pass\n", TRIED_WITH),
    ("each set of attributes in a trial", VERIFY, "(told, dtype, attributes(p)), (", "(told, dtype, attributes(group[\"params\"][0])), (", TRIED_WITH),
    ("attributes that steps change", VERIFY, ", str(attributes(q)), str(attributes(p)))", ", 0, 0)", TRIED_WITH),
    ("a storage for each weight", RUN, "from_dlpack(part.view(p.shape))", "part.view(p.shape)", SAVED),
    ("sums in a trial", VERIFY, "if most > 1 and size != most and", "if False and", f"{FUSE}::test_classes_whose_bits_would_change_are_refused[DAdapt]"),
    ("small weights in a trial", VERIFY, " * (1, 1e-6)[place % 2]", " * (1, 1)[place % 2]", f"{FUSE}::test_classes_whose_bits_would_change_are_refused[DiffGrad]"),
    ("momenta in a bucket", RUN, "    if own is None or is_state_held or not", "    if own is None or not", "tests/test_fuse_interplay.py::test_S6_gradients_and_momenta_stay_in_their_buckets[200]"),
    ("the time of a trial", VERIFY, "        if time.monotonic() > self._deadline:\n", "        if False:\n", f"{VERDICTS}::test_a_trial_ends_in_the_middle_of_a_step[SlowInside]"),
    ("an error that no optimizer handles", VERIFY, "class _RefusedError(BaseException):", "class _RefusedError(Exception):", f"{VERDICTS}::test_a_trial_ends_in_the_middle_of_a_step[Stubborn]"),
]  # fmt: skip
LOW_RANK, LOW_RANK_OP, TOP_K_OP, COMPRESSED, TENSORS, HOOKS = (
    f"src/bagua_ref/{name}.py"
    for name in (
        "low_rank", "comm_ops/low_rank", "comm_ops/top_k", "algorithms/compressed_gradients", "algorithms/named_tensors",
        "integrations/ddp_hooks",
    )
)  # fmt: skip
SPARSE, ROUND_OF, PROPERTY, SPARSE_PROPERTY, HOOKED = (
    "tests/test_low_rank.py", "tests/test_low_rank.py::test_S10_4_what_overflows_is_nan_on_every_rank_and_leaves_no_trace",
    "property_tests/test_low_rank.py", "property_tests/test_topk.py", "tests/test_ddp_hooks.py",
)  # fmt: skip
BESIDE_TORCH = f"{SPARSE}::test_S10_3_each_round_gives_what_torchs_hook_gives_from_equal_memories_and_factors[2-4]"
DIFFERENT, SAME = (
    f"{HOOKED}::test_ranks_that_differ_are_an_error_on_every_rank_for_good",
    f"{HOOKED}::test_a_hook_gives_what_with_bagua_gives_for_the_same_buckets_to_the_bit",
)
COMPRESSING = [
    ("columns that have become 0", LOW_RANK, "            columns[:, empty] = fresh.to(columns)[:, empty]\n", "            pass\n", f"{PROPERTY}::test_S10_2_a_gradient_of_zero_gives_zero_and_later_ones_are_exact_again[True-None]"),
    ("columns that depend on others", LOW_RANK, "norm > THRESHOLD * before[:, place : place + 1]", "norm > 0", f"{PROPERTY}::test_S10_3_columns_are_orthonormal_or_zero_and_span_what_they_did"),
    ("squares that overflow", LOW_RANK, "    columns /= torch.where(largest > 0, largest, 1)", "    columns /= 1", f"{SPARSE}::test_S10_3_columns_of_the_largest_numbers_are_orthonormalized"),
    ("adding the memory", LOW_RANK_OP, "            torch._foreach_add_(gradients, [self._errors[a.name] for a in self.matrices])\n", "            pass\n", BESIDE_TORCH),
    ("a first message that overflows", LOW_RANK_OP, "        return left, _are_finite(summed, left)\n", "        return left, [True] * len(left)\n", f"{ROUND_OF}[in the first message]"),
    ("a second message that overflows", LOW_RANK_OP, "_are_finite(right_flat, right)", "[True] * len(right)", f"{ROUND_OF}[in the second message]"),
    ("gradients that overflow on one rank", LOW_RANK_OP, "                gradient.fill_(torch.nan)\n", "                pass\n", f"{ROUND_OF}[on one rank]"),
    ("the mean of what is not compressed", LOW_RANK_OP, "        self.kernels.divide_(plain, self.comm.nranks())\n", "", BESIDE_TORCH),
    ("the own approximation's error", LOW_RANK_OP, '[q.clone() for q in right] if self._memory == "local" else right', "right", f"{SPARSE}::test_S10_2_a_local_memory_has_nothing_of_what_the_factors_span"),
    ("compressed rounds", COMPRESSED, '            Fact("{has} finished {value} compressed rounds", self.rounds),\n', "", f"{SPARSE}::test_states_that_differ_between_ranks_are_an_error_on_every_rank[algorithm1-rounds]"),
    ("comparing factors that were loaded", COMPRESSED, "[*super().replicas(), *((factor, []) for factor in self.factors.written())]", "super().replicas()", f"{SPARSE}::test_states_that_differ_between_ranks_are_an_error_on_every_rank[algorithm2-factors]"),
    ("memories of another rank", COMPRESSED, "            check_saved_here(state, self.process_group)\n", "            pass\n", f"{SPARSE}::test_memories_of_another_rank_are_refused_by_name_unless_they_are_dropped[powersgd]"),
    ("memories that do not fit", COMPRESSED, "            self.memories.check(memories)\n", "            pass\n", f"{SPARSE}::test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded"),
    ("dividing by ranks that have batches", COMPRESSED, "        if self.has_memory:\n", "        if False:\n", "tests/test_uneven.py::test_what_has_no_meaning_is_refused_on_entering[divide_by_initial_world_size=False: powe]"),
    ("the phase of a rank without batches", COMPRESSED, "        self._shadowed, self.rounds = bool(facts[0]), facts[1]\n", "        self.rounds = facts[1]\n", "tests/test_uneven.py::test_it_equals_training_in_which_ranks_without_batches_have_a_loss_of_zero[nodes0-powersgd]"),
    ("steps that no backward preceded, when compressing", COMPRESSED, "    steps_follow_backward = True\n", "", f"{SPARSE}::test_a_step_that_no_backward_preceded_counts_as_none"),
    ("ties", TOP_K_OP, "    chosen[tied[: k - int(chosen.sum())]] = True\n", "    chosen[tied[int(chosen.sum()) - k :]] = True\n", f"{SPARSE_PROPERTY}::test_S11_2_the_largest_are_chosen_ties_go_to_the_lower_index_and_nan_is_the_largest"),
    ("candidates that are too few", TOP_K_OP, "        if candidates.numel() >= k:\n", "        if True:\n", f"{SPARSE_PROPERTY}::test_S11_2_the_largest_of_many_are_those_of_a_stable_sort"),
    ("forgetting what was sent", TOP_K_OP, "            error[own] = 0\n", "            pass\n", f"{SPARSE_PROPERTY}::test_S11_2_what_was_applied_and_the_mean_of_the_memories_is_the_sum_of_the_means"),
    ("float64 where it cannot be sent", TOP_K_OP, "        if dtype is torch.float64:\n", "        if False:\n", f"{SPARSE}::test_S11_2_float64_is_refused_by_name_when_wrapping_and_when_an_operation_is_made"),
    ("memories in one flat tensor after loading", TENSORS, "        self._flats = {}\n        self._values = {\n", "        self._values = {\n", f"{PROPERTY}::test_a_restart_at_any_step_equals_an_undisturbed_run_to_the_bit[topk]"),
    ("comparing options of hooks", HOOKS, "            self._agreement.begin([options], flag=False).check_facts()\n", "            pass\n", f"{DIFFERENT}[options]"),
    ("comparing before a hook's round", HOOKS, "                self._worker.submit(_Begin(self, self._compare()))\n", "                pass\n", f"{DIFFERENT}[reductions]"),
    ("telling the others that a hook has failed", HOOKS, "        self.process_group.abort(why)\n", "", f"{DIFFERENT}[failure]"),
    ("results in a padded bucket", HOOKS, "        if flat.data_ptr() != gradients[0].data_ptr():\n", "        if False:\n", f"{SAME}[bytegrad]"),
    ("counting reductions", HOOKS, "        self.steps_of_optimizers[0] += 1\n", "", f"{SAME}[topk]"),
    ("the order of parameters in DDP's buckets", HOOKS, "        for parameter in reversed(parameters):\n", "        for parameter in parameters:\n", f"{SAME}[powersgd]"),
]  # fmt: skip
ERROR_OP, ERROR_MEMORIES, CHECKED_STATE, TO_CODEC, REPLAY, QADAM = (
    f"src/bagua_ref/{name}.py"
    for name in (
        "comm_ops/error_feedback", "algorithms/error_memories", "algorithms/versioned_state", "compression",
        "conformance/trace/replay", "algorithms/q_adam",
    )
)  # fmt: skip
MEMORY, KEPT = "tests/test_error_feedback.py", "property_tests/test_error_feedback.py"
NOTHING_LOST = f"{KEPT}::test_S11_1_what_was_applied_and_what_was_kept_is_the_sum_of_the_means[OneBit]"
POISONED = f"{MEMORY}::test_S11_1_elements_whose_result_is_nan_leave_the_memories_of_every_rank[nan]"
PADDED, ANEW, UNFIT = (
    f"{MEMORY}::test_S11_1_padding_is_never_remembered",
    f"{MEMORY}::test_memories_survive_new_buckets_of_the_same_tensors_and_start_at_zero_in_others[bytegrad]",
    f"{MEMORY}::test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded",
)
OTHER_BUCKETS = f"{MEMORY}::test_memories_of_other_buckets_are_dropped_with_a_warning"
OTHER_RANK = f"{MEMORY}::test_memories_of_another_rank_are_refused_by_name_unless_they_are_dropped[bytegrad]"
REMEMBERING = [
    ("adding the worker memory", ERROR_OP, "decoded + self.memory.worker", "decoded.clone()", NOTHING_LOST),
    ("adding the server memory", ERROR_OP, "        own += self.memory.server\n", "", NOTHING_LOST),
    ("remembering what the own payload left out", ERROR_OP, "        worker -= decoded\n", "        worker.zero_()\n", NOTHING_LOST),
    ("remembering what the result left out", ERROR_OP, "        server -= own\n", "        server.zero_()\n", NOTHING_LOST),
    ("worker memories in a NaN round", ERROR_OP, "            worker = torch.where(poisoned, self.worker, worker)\n", "", POISONED),
    ("server memories in a NaN round", ERROR_OP, "torch.where(poisoned[place * size : (place + 1) * size], self.server, server)", "server", POISONED),
    ("padding of worker memories", ERROR_OP, "        worker[self.filled :] = 0\n", "", PADDED),
    ("padding of server memories", ERROR_OP, "        server[max(self.filled - place * size, 0) :] = 0\n", "", PADDED),
    ("payloads in float32", ERROR_OP, "x.float()  # x itself, if it is float32", "x", f"{MEMORY}::test_S11_1_what_16_bit_dtypes_round_away_is_not_remembered_and_payloads_are_float32"),
    ("memories of buckets that were made anew", ERROR_MEMORIES, "        if known is None:\n            for other", "        if True:\n            for other", ANEW),
    ("memories of buckets that are gone", ERROR_MEMORIES, "                del self._memories[other]\n", "                pass\n", ANEW),
    ("error memories of another rank", ERROR_MEMORIES, "        check_saved_here(saved, self._group)\n", "", OTHER_RANK),
    ("error memories of another version", CHECKED_STATE, '    if state["version"] != _VERSION:\n', "    if False:\n", UNFIT),
    ("error memories of another model", ERROR_MEMORIES, "        if here and here != there:\n", "        if False:\n", UNFIT),
    ("error memories of another size", ERROR_MEMORIES, "                if (bucket[name].dtype, tuple(bucket[name].shape)) != (torch.float32, (size,)):\n", "                if False:\n", UNFIT),
    ("saying that memories are dropped", ERROR_MEMORIES, "        if lost:\n", "        if False:\n", OTHER_BUCKETS),
    ("memories that were not saved", ERROR_MEMORIES, "            memory.restore(None)\n", "            pass\n", OTHER_BUCKETS),
    ("memories of a fragment that is not applied", STATE, "                memory.restore(kept)\n", "                pass\n", f"{MEMORY}::test_S9_5_a_mean_that_is_not_finite_leaves_all_memories_of_its_fragment[0]"),
    ("memories of fragments in states", DILOCO, "        self.error_memories.load(self.error_memories.check(state, drop_local))\n", "", f"{MEMORY}::test_a_restart_at_any_step_equals_an_undisturbed_run_to_the_bit[all ranks-diloco]"),
    ("codecs that need a memory", TO_CODEC, "codec.biased and not has_memory", "codec.biased", f"{MEMORY}::test_one_bit_warns_without_error_memory_only[bytegrad]"),
    ("momenta with memory in join", QADAM, "        if self.error_memories.error_feedback:\n", "        if False:\n", "tests/test_uneven.py::test_what_has_no_meaning_is_refused_on_entering[qadam with error_feedback=True cannot tr]"),
    ("replaying what depends on memories", REPLAY, "        if any(record.info", "        if False and any(record.info", "tests/test_trace.py::test_operations_with_error_memory_are_not_checked[bytegrad]"),
]  # fmt: skip
UNUSED_FILE, UNUSED = "src/bagua_ref/data_parallel/unused_parameters.py", "tests/test_unused_parameters.py"
STAYS, LEAVES = (
    f"{UNUSED}::test_S2_5_what_no_rank_reaches_keeps_its_gradient_and_does_not_move",
    f"{UNUSED}::test_S2_5_qadam_leaves_the_momentum_and_memory_of_what_no_rank_reaches[False-True-True]",
)
NOT_REACHED = [
    ("what other ranks have reached", UNUSED_FILE, " for words in notes)", " for words in [note])", f"{STAYS}[gradient_allreduce-True]"),
    ("what was reached under no_sync", WRAPPED, "        self.rounds.note_reached(name)\n", "", f"{UNUSED}::test_S2_5_what_was_reached_under_no_sync_counts[2]"),
    ("forgetting what was reached", UNUSED_FILE, "        self.reached.clear()\n", "", f"{STAYS}[gradient_allreduce-True]"),
    ("values in the bucket", UNUSED_FILE, "                before[0].detach().copy_(before[1])", "                pass", f"{UNUSED}::test_S2_5_a_gradient_in_the_bucket_keeps_its_values"),
    ("what memories deliver", UNUSED_FILE, "if delivers and parameter.grad.any():", "if False:", f"{UNUSED}::test_S2_5_what_an_error_memory_delivers_is_a_gradient[topk-True]"),
    ("what a codec makes of zero", UNUSED_FILE, "if delivers and parameter.grad.any():", "if parameter.grad.any():", f"{STAYS}[bytegrad, OneBit-True]"),
    ("ranks without batches", ROUNDS, "                    self._unused.agree_without_batch()\n", "                    pass\n", f"{UNUSED}::test_S2_5_ranks_without_batches_take_part[gradient_allreduce]"),
    ("momenta that stay", QADAM, '["exp_avg"].copy_(momentum)', '["exp_avg"].add_(0)', LEAVES),
    ("memories of momenta that stay", QADAM, "                        memory.put_back(kept, start, start + proxy.numel(), place)\n", "                        pass\n", LEAVES),
    ("momenta before an overflow", QADAM, "                momentum.undo_overflow()\n", "                pass\n", f"{UNUSED}::test_S2_5_qadam_leaves_the_momentum_that_it_had_before_an_overflow[True]"),
    ("agreement inside nodes", UNUSED_FILE, "group.get_intra_node_communicator() if algorithm.round_stays_in_node else ", "", f"{STAYS}[local_sgd, in nodes-True]"),
]  # fmt: skip
OVERLAP, PIECES, GLOO, CONNECTION, ENCODER, TILES = (
    f"src/bagua_ref/{name}.py"
    for name in (
        "communicators/overlap", "communicators/pieces", "communicators/torch_distributed", "communicators/connection",
        "backends/reference/codecs/minmax_uint8", "backends/reference/blocks",
    )
)  # fmt: skip
ON_GLOO, MOVING = "tests/test_overlap_gloo.py", "property_tests/test_overlap.py"
SAME_BITS = f"{MOVING}::test_S3_2_every_bucket_has_the_bits_of_the_plain_operation_however_its_bytes_move"
SAME_BITS_ON_GLOO = f"{ON_GLOO}::test_S3_2_S11_1_processes_give_the_bits_of_the_simulation_however_many_pieces_there_are[gloo-2]"
BROKEN = f"{ON_GLOO}::test_S2_5_a_codec_that_fails_in_the_middle_of_a_payload_is_an_error_on_every_rank_at_once[gloo-2]"
STEPS = (
    f"{MOVING}::test_S4_S12_bytes_that_are_final_stay_and_bytes_beyond_those_needed_do_not_matter[2-1-torch.float32-MinMaxUInt8]"
)
ADVANCE = f"{MOVING}::test_long_chunks_take_several_steps_and_all_chunks_advance_together"
OVERLAPPING = [
    ("filling before bytes move", OVERLAP, "while self._filled < size:", "while self._filled < 0:", SAME_BITS),
    ("reading after bytes have come", OVERLAP, "while self._needed <= size:", "while self._needed < math.inf:", SAME_BITS),
    ("reading up to the last byte", OVERLAP, "while self._needed <= size:", "while self._needed < size:", f"{MOVING}::test_a_step_is_taken_as_soon_as_its_last_byte_has_come"),
    ("the first step of a codec that is done with no byte", OVERLAP, "self._filled = self._needed = -1.0", "self._filled = self._needed = 32.0", "property_tests/test_overlap.py::test_a_step_is_taken_as_soon_as_its_last_byte_has_come"),
    ("steps that are left in the end", OVERLAP, "        self.read(sys.maxsize)\n", "        pass\n", f"{MOVING}::test_steps_that_ask_for_more_bytes_than_there_are_run_when_all_have_come[alltoall]"),
    ("filling a piece before it is sent", PIECES, "            compute(before, place, PIECE)\n", "", SAME_BITS_ON_GLOO),
    ("reading a piece that has come", PIECES, "            compute(after, ended, PIECE)\n", "", f"{ON_GLOO}::test_gloo_reads_pieces_while_later_ones_are_still_to_be_filled"),
    ("pieces that are waited for", PIECES, "            yield from works.pop(ended)\n", "            works.pop(ended)\n", SAME_BITS_ON_GLOO),
    ("the own chunk, which does not travel", GLOO, "            incoming[self._rank][piece].copy_(outgoing[self._rank][piece])\n", "", SAME_BITS_ON_GLOO),
    ("telling the others that computing has failed", CONNECTION, '            self._last_words.tell(f"{type(own).__name__}: {own}")\n', "", BROKEN),
    ("letting go of connections when computing has failed", CONNECTION, "                traceback.clear_frames(known.__traceback__)\n", "                pass\n", "tests/test_gloo.py::test_S2_5_no_work_outlives_what_failed_between_two_pieces_even_if_the_error_is_kept"),
    ("bytes that are final", ENCODER, "            yield HEADER_BYTES + columns.stop\n", "            yield payload.shape[1]\n", ADVANCE),
    ("the header that is needed", ENCODER, "    yield HEADER_BYTES\n    item", "    yield 0\n    item", STEPS),
    ("the levels that are needed", ENCODER, "        yield HEADER_BYTES + columns.stop\n        value", "        yield HEADER_BYTES\n        value", STEPS),
    ("all chunks at the same time", TILES, "    for column in range(0, num_columns, columns):\n        for row in range(0, num_rows, rows):\n", "    for row in range(0, num_rows, rows):\n        for column in range(0, num_columns, columns):\n", ADVANCE),
]  # fmt: skip
SOCKETS, OVER_SOCKETS = "src/bagua_ref/communicators/notes.py", "tests/test_notes.py"
MESH = "src/bagua_ref/communicators/mesh.py"
DROPS = (
    "            if direct is not None:\n                direct.close()\n        if self._gloo_sockets is not None:  # gloo closes"
)
NOTES = [
    ("strangers at the port of notes", MESH, "hmac.compare_digest(greeting[:_TOKEN], token) and ", "", f"{OVER_SOCKETS}::test_a_stranger_at_the_port_is_sent_away_and_delays_nobody"),
    ("processes of other users", MESH, "        if user != os.geteuid():\n", "        if False:\n", f"{OVER_SOCKETS}::test_processes_of_another_user_are_not_heard"),
    ("more strangers than may be open", MESH, " or len(greetings) > len(missing) + _STRANGERS:\n", ":\n", f"{OVER_SOCKETS}::test_strangers_beyond_a_number_are_sent_away"),
    ("a backlog full of strangers", MESH, "        except BlockingIOError:  # a Unix", "        except ZeroDivisionError:  # a Unix", f"{OVER_SOCKETS}::test_ranks_connect_though_strangers_fill_the_backlog[Unix]"),
    ("ranks that do not connect", MESH, "min(_LIMIT, timeout / 2)", "_LIMIT", f"{OVER_SOCKETS}::test_where_a_rank_does_not_connect_the_others_give_up_before_the_timeout[Unix]"),
    ("agreeing on the sockets", MESH, "        if not all(reached):\n", "        if len(sockets) != nranks - 1:\n", f"{OVER_SOCKETS}::test_where_a_rank_cannot_be_reached_no_rank_uses_sockets[1]"),
    ("a time limit for notes", SOCKETS, "                self._failed = \"timed out\"\n", "                raise RuntimeError(\"timed out\")\n", f"{OVER_SOCKETS}::test_waiting_ends_at_its_limit_and_has_failed_at_the_timeout"),
    ("a rank whose socket is closed", SOCKETS, "            if not more:\n", "            if False:\n", f"{OVER_SOCKETS}::test_a_rank_that_leaves_is_noticed_at_once_whoever_else_is_late[1-TCP]"),
    ("looking at all ranks at a time", SOCKETS, "wait(list(self._missing), left)", "wait(list(self._missing)[:1], left)", f"{OVER_SOCKETS}::test_a_rank_that_leaves_is_noticed_at_once_whoever_else_is_late[1-TCP]"),
    ("notes of another length", SOCKETS, "                if (length := array(\"q\", self._received[peer])[0]) != len(self._note):\n", "                if False:\n", f"{OVER_SOCKETS}::test_notes_of_different_lengths_are_an_error_on_both_ranks"),
    ("notes that were not waited for", SOCKETS, "        if self._missing:\n            raise", "        if False:\n            raise", f"{OVER_SOCKETS}::test_an_exchange_that_was_not_waited_for_is_an_error_at_the_next"),
    ("sockets of a forked child", MESH, "        if os.getpid() == pid:", "        if True:", f"{OVER_SOCKETS}::test_a_forked_child_that_lets_go_of_the_sockets_leaves_them_to_its_parent"),
    ("closing sockets with the connection", CONNECTION, "        for direct in (self._sockets, self.memory):\n" + DROPS, "        for direct in (self.memory,):\n" + DROPS, f"{OVER_SOCKETS}::test_a_rank_that_gives_up_is_noticed_by_those_that_wait_for_its_note"),
]  # fmt: skip
SLOTS, SHARED = "src/bagua_ref/communicators/shared_memory.py", "tests/test_shared_memory.py"
TOGETHER = f"{SHARED}::test_ranks_share_memory_if_all_are_on_one_node_of_one_machine_and_may"
SHARING = [
    ("tensors of other sizes in slots", SLOTS, "        if (theirs := self._filled[0]) != call:\n", "        if (theirs := self._filled[0]) != call and False:\n", f"{SHARED}::test_every_rank_raises_if_tensors_differ_in_size"),
    ("other collectives in slots", SLOTS, "    return zlib.crc32(name.encode()) | 2**32, tensor.nbytes\n", "    return 1, tensor.nbytes\n", f"{SHARED}::test_ranks_in_different_collectives_are_told[operation]"),
    ("waiting for a free slot", SLOTS, "        yield from self._until(pipe, pipe.has_room)\n", "", f"{SHARED}::test_a_sender_waits_for_a_receiver_only_when_its_slots_are_full[5]"),
    ("a rank that has left shared memory", SLOTS, "            if self._pipe.gone:\n", "            if False:\n", f"{SHARED}::test_a_rank_that_leaves_is_noticed_at_once[10]"),
    ("sending to a rank that has left shared memory", SLOTS, "        if pipe.gone:\n            raise RuntimeError(pipe.gone)\n", "", f"{SHARED}::test_what_a_rank_sent_before_it_left_is_received"),
    ("a time limit for slots", SLOTS, "            if (left := until - time.monotonic()) <= 0:\n", "            if (left := 0.1) <= 0:\n", f"{SHARED}::test_waiting_ends_at_its_limit_and_has_failed_at_the_timeout"),
    ("the order of ranks in a sum", SLOTS, "out=piece if self._rank < 2 else None", "out=piece", f"{SHARED}::test_S3_9_an_all_reduce_combines_in_the_order_of_ranks[3]"),
    ("messages about slots that come in pieces", SLOTS, "        self._received = whole[end:]\n", "", f"{SHARED}::test_messages_about_slots_may_come_in_pieces"),
    ("agreeing on shared memory", SLOTS, "    if all(has_slots for (has_slots,) in share([int(bool(slots))])):\n", "    if share([int(bool(slots))]) and slots:\n", f"{SHARED}::test_where_a_rank_cannot_share_memory_no_rank_does[_share_slots-1]"),
    ("networks of their own", SLOTS, " {os.stat('/proc/self/ns/net').st_ino}", "", TOGETHER),
    ("nodes of their own", "src/bagua_ref/communicators/torch_transport.py", "[(node, where) for node, (*_, where) in zip", "[(0, where) for node, (*_, where) in zip", TOGETHER),
    ("closing shared memory with the connection", CONNECTION, "        for direct in (self._sockets, self.memory):\n" + DROPS, "        for direct in (self._sockets,):\n" + DROPS, f"{SHARED}::test_a_rank_that_gives_up_is_noticed_at_once_though_it_lives_on"),
]  # fmt: skip
WAITING, TOLD = (
    "src/bagua_ref/communicators/waiting.py",
    "tests/test_gloo.py::test_those_who_wait_for_a_rank_that_gave_up_are_told_though_it_lives_on",
)
GIVING_UP = [
    ("asking who gave up", CONNECTION, "        who_gave_up = self._last_words.heard_so_far\n", '        who_gave_up = lambda: ""\n', f"{TOLD}[abort-enough-gloo]"),
    ("telling that a rank was interrupted", CONNECTION, '            self._last_words.tell(f"{type(interruption).__name__} in {collective}")\n', "", f"{TOLD}[Ctrl-C-KeyboardInterrupt in allreduce-gloo]"),
    ("ending long waits alone", WAITING, "else self._long().values()):\n", "else self._waits.values()):\n", "tests/test_waiting.py::test_a_wait_that_a_rank_has_given_up_ends_once_it_is_long"),
    ("errors that keep no works alive", CONNECTION, "            error.__traceback__ = error.__context__ = None\n", "            error.__traceback__ = None\n", "tests/test_gloo.py::test_works_are_freed_before_abort_can_have_the_turn_even_if_the_error_is_kept[failed]"),
]  # fmt: skip
PROCESSES, DYING, KILLED = (
    "src/bagua_ref/communicators/processes.py",
    "tests/test_processes.py",
    "tests/test_faults.py::test_S2_5_a_killed_rank_is_noticed_and_named_at_once_whoever_holds_its_sockets",
)
FOUND, TRANSPORT = "src/bagua_ref/communicators/gloo_sockets.py", "src/bagua_ref/communicators/torch_transport.py"
DIFFERENT = "tests/test_gloo.py::test_S3_9_ranks_that_make_different_calls_are_told_at_once_who_calls_what"
ENDING = [
    ("PIDs that are used again", PROCESSES, "            if _start_time(pid) != started:", "            if False:", f"{DYING}::test_a_process_that_has_the_number_of_an_earlier_one_is_another"),
    ("processes of other machines", PROCESSES, "if other != rank and where and where == found[rank][0]:", "if other != rank:", f"{DYING}::test_processes_elsewhere_are_not_watched"),
    ("ranks that have left", WAITING, "                if not self._has_left(rank):\n", "                if True:\n", f"{DYING}::test_waits_for_a_rank_whose_process_has_ended_are_interrupted_unless_it_has_left[left]"),
    ("waits for other ranks than the one that has ended", WAITING, "                gone = ended.keys() & set(wait.members)\n", "                gone = ended.keys()\n", f"{DYING}::test_waits_for_a_rank_whose_process_has_ended_are_interrupted_unless_it_has_left[killed]"),
    ("interrupting messages over gloo", CONNECTION, "            self._gloo_sockets.shut_down()\n\n    def _wait_in_ticks", "            pass\n\n    def _wait_in_ticks", f"{KILLED}[fork of C-low_precision_decentralized-gloo]"),
    ("aborting messages over gloo", CONNECTION, "        elif self._gloo_sockets is not None:\n            self._gloo_sockets.shut_down()\n", "", f"{SHARED}::test_abort_ends_a_wait_for_a_message_at_once[gloo]"),
    ("gloo's sockets in a forked child", FOUND, "        for file in self._open():\n            os.close(file)\n", "        pass\n", "tests/test_fork.py::test_S2_5_a_forked_child_holds_no_socket_of_its_parents_groups[gloo]"),
    ("the store's sockets in a forked child", TRANSPORT, "        close_served(self.store)\n", "        pass\n", "tests/test_fork.py::test_S2_5_a_forked_child_holds_no_socket_of_its_parents_groups[gloo]"),
    ("comparing calls over gloo", GLOO, "                self._connection.compare(_name(call), call)\n", "                pass\n", f"{DIFFERENT}[2-gloo]"),
    ("comparing calls in shared memory", GLOO, "            everyone = self.compares_calls and name != \"\"\n", "            everyone = False\n", f"{DIFFERENT}[2-memory]"),
    ("comparing calls with little to send", GLOO, "            elif tensor is None or tensor.numel() < self._nranks**2:\n", "            elif False:\n", f"{DIFFERENT}[3-memory]"),
    ("messages of other dtypes in shared memory", SLOTS, "_call(name or f\"exchange of {tensor.dtype}\", tensor)", "_call(name, tensor)", "tests/test_gloo.py::test_S3_9_a_message_of_another_size_or_dtype_is_an_error_on_both_ranks[memory]"),
    ("the next job's store", "src/bagua_ref/process_group.py", "            if store is not None or not world.has_met:\n", "            if True:\n", "tests/test_job_store.py::test_S1_jobs_may_follow_each_other_on_one_port_and_leave_no_descriptors"),
]  # fmt: skip
FORM = "tests/test_context_form.py"
FUNCTIONAL = "tests/test_functional_forwards.py"
HOOKS = "src/bagua_ref/data_parallel/wrapped_module.py"
ROUND_ENDS, NOTE = "src/bagua_ref/scheduling/engine.py", "src/bagua_ref/communicators/notes.py"
BESIDE_BACKWARD = [
    ("a busy worker at the beginning of a round", ROUND_ENDS, "            if waits or not self._worker.idle:\n", "            if waits:\n", "tests/test_engine.py::test_what_waits_for_no_rank_begins_a_round_on_the_marking_thread_unless_the_worker_is_busy"),
    ("waiting before a round ends", ROUND_ENDS, "            runs = self._worker.wait()\n            if self._opening is not None:\n                _Closing(self._opening, self._fate)()\n                self._opening = None\n", "            if self._opening is not None:\n                _Closing(self._opening, self._fate)()\n                self._opening = None\n            runs = self._worker.wait()\n", "tests/test_engine.py::test_a_round_is_closed_after_its_last_bucket_and_waiting_raises_what_that_raises[False]"),
    ("notes that have failed", NOTE, "        return not self._failed and not self._missing\n", "        return not self._missing\n", "tests/test_notes.py::test_notes_of_different_lengths_are_an_error_on_both_ranks"),
    ("local notes on one machine", CONNECTION, '            host = "" if self.memory is not None else host_of(self._store)\n', "            host = host_of(self._store)\n", "tests/test_notes.py::test_gloo_trainings_use_sockets_where_they_can_and_end_alike"),
]  # fmt: skip
TRACING = [
    ("a compiled step", "src/bagua_ref/data_parallel/gradient_hook.py", "        if is_dynamo_compiling():", "        if False:", "tests/test_torch_compile.py::test_a_training_step_can_be_compiled_as_a_whole[gradient_allreduce]"),
]  # fmt: skip
CONTEXT_FORM = [
    ("a first gradient that stands in for the forward pass", HOOKS, "                self._begin_forward((), not self.skipping, in_backward=True)\n", "", f"{FORM}::test_the_context_gives_the_bits_of_with_bagua[decentralized]"),
    ("no step after a backward pass that failed", HOOKS, "        if self.without_forward and self._in_backward and not inside_backward():\n", "        if False:\n", f"{FORM}::test_no_step_follows_a_backward_pass_that_failed"),
    ("a first gradient that stands in for a functional forward", HOOKS, "            self._begin_forward((), synchronized, in_backward=True)\n", "            pass\n", f"{FUNCTIONAL}::test_S5_a_backward_that_reaches_the_parameters_is_synchronized[fast_weights_alone-flat]"),
    ("a functional forward of an earlier step", HOOKS, "        self._functional.take()\n        self._guard.before_step(optimizer)\n", "        self._guard.before_step(optimizer)\n", f"{FUNCTIONAL}::test_a_functional_forward_of_an_earlier_step_makes_no_backward_legal"),
    ("buffers during a backward pass", HOOKS, " and self.bagua_algorithm.ranks_in_step and not in_backward:", " and self.bagua_algorithm.ranks_in_step:", f"{FUNCTIONAL}::test_S5_buffers_are_not_broadcast_during_a_functional_backward"),
    ("a forward pass inside transforms", HOOKS, "        with outside_transforms():\n", "        if True:\n", f"{FUNCTIONAL}::test_S5_a_backward_that_reaches_the_parameters_is_synchronized[slopes_of_inputs-wrapper]"),
    ("DistributedDataParallel around a training", HOOKS, "        refuse_both(self.given_group)\n", "", f"{FORM}::test_DistributedDataParallel_over_the_same_ranks_is_refused"),
]  # fmt: skip
GUARDS = (
    CACHE
    + AGREEMENT
    + NOT_REACHED
    + GRAPHS
    + JOIN
    + LOCAL_UPDATES
    + FUSED
    + COMPRESSING
    + REMEMBERING
    + OVERLAPPING
    + NOTES
    + SHARING
    + GIVING_UP
    + ENDING
    + BESIDE_BACKWARD
    + TRACING
    + CONTEXT_FORM
)


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with copy_of_checkout() as folder:
        yield folder


@pytest.fixture(scope="module")
def warm_pytest() -> Iterator[WarmPytest]:
    with WarmPytest() as runs:
        yield runs


def test_the_tests_pass_without_a_mutant(copy: Path) -> None:
    code, output = run_pytest(copy, [guard[-1] for guard in GUARDS], limit=200)
    assert code == 0, output


@pytest.mark.parametrize(("file", "old", "new", "test"), [guard[1:] for guard in GUARDS], ids=[guard[0] for guard in GUARDS])
def test_without_the_guard_a_test_fails(copy: Path, warm_pytest: WarmPytest, file: str, old: str, new: str, test: str) -> None:
    original = (copy / file).read_text()
    assert original.count(old) == 1
    try:
        (copy / file).write_text(original.replace(old, new))
        code, output = warm_pytest.run(copy, ["--timeout=15", test], limit=60)
    finally:
        (copy / file).write_text(original)
    assert code in (1, None), output  # None: not even pytest's own time limit ended it
