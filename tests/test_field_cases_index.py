"""Which test proves which field case: how systems like this one failed in public, and what is right instead.

A case is a letter for its kind and a number. Each is proven by the tests named
here, or open with the reason.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent

NAMED = "reliability/test_named_cases.py"
FAULTS = "reliability/test_faults.py"
STORE = "store/test_field_cases.py"
SPINE = "runtime/test_spine.py"
MORE = "runtime/test_field_cases_more.py"
TRIP = "state/test_round_trip.py"
KINDS = "state/test_kinds.py"
MEMORY = "state/test_memory.py"
LOADER = "data/test_loader.py"
FUZZ = "fuzz/test_fuzz.py"

CASES: dict[str, tuple[str, list[str]]] = {
    # What counts as a checkpoint.
    "A1": (
        "an interrupted save is never selected, nor one that lacks an object",
        [
            f"{SPINE}::test_an_attempt_without_a_manifest_is_never_selected",
            f"{SPINE}::test_a_missing_shard_makes_all_ranks_fall_back_together",
        ],
    ),
    "A2": (
        "a copy restores with its records, and is left alone without",
        [
            f"{NAMED}::TestA2Copies::test_a_whole_copy_is_restorable",
            f"{NAMED}::TestA2Copies::test_a_copy_without_its_records_is_refused_with_what_to_do",
            f"{NAMED}::TestA2Copies::test_a_copy_without_its_manifest_is_left_alone",
            f"{NAMED}::TestSweep::test_within_the_grace_time_nothing_goes",
        ],
    ),
    "A3": (
        "a remote stream is whole or found out, without a descriptor to sync",
        [
            f"{STORE}::TestA3RemoteStreamsAreNotFiles::test_a_stream_without_a_descriptor_is_whole",
            f"{STORE}::TestA3RemoteStreamsAreNotFiles::test_a_stream_that_drops_its_end_is_found_out",
            f"{STORE}::TestA3RemoteStreamsAreNotFiles::test_a_dropped_last_buffer_is_found_out_everywhere",
        ],
    ),
    "A4": (
        "the newest stays the newest while the next is uploaded",
        [f"{FAULTS}::test_a4_the_newest_stays_the_newest_while_another_is_uploaded"],
    ),
    "A5": ("no empty object is ever written", [f"{STORE}::test_a5_nothing_empty_is_ever_written"]),
    "A6": (
        "residue of a save does not stop the next one of that step, nor does a commit",
        [
            f"{NAMED}::test_a6_a_step_whose_save_was_interrupted_is_saved_again",
            f"{MORE}::test_a6_a_step_that_is_committed_may_be_saved_again",
        ],
    ),
    # Finding the newest.
    "B1": (
        "listings are fresh, and the user's own file system keeps its cache",
        [
            f"{STORE}::TestB1ListingsAreFresh::test_another_writer_is_seen_at_once",
            f"{STORE}::TestB1ListingsAreFresh::test_the_users_own_file_system_is_left_alone",
        ],
    ),
    "B2": (
        "a run that has checkpoints does not start at 0 by itself",
        [
            f"{NAMED}::TestB2NothingStartsAtZeroByItself::test_a_lineage_whose_checkpoints_are_gone_is_an_error",
            f"{NAMED}::TestB2NothingStartsAtZeroByItself::test_an_empty_root_is_a_new_run",
            "core/test_restore_vote.py::test_a_run_whose_checkpoints_are_all_bad_does_not_start_at_zero",
            f"{SPINE}::test_a_new_coordinator_process_resumes_from_the_store_alone",
        ],
    ),
    "B3": (
        "a step that does not exist is an error that lists those that do",
        [
            f"{NAMED}::test_b3_a_step_that_is_not_there_stops_the_run_before_it_starts",
            "core/test_lineage.py::test_a_step_that_does_not_exist_is_an_error_that_lists_those_that_do",
            "test_config_and_errors.py::test_a_bad_setting_is_named_with_its_value",
        ],
    ),
    "B4": (
        "one decision for all ranks",
        [
            "core/test_restore_vote.py::test_one_bad_rank_takes_all_to_the_older_one",
            "core/test_restore_vote.py::test_proceed_means_that_every_rank_said_so",
            f"{SPINE}::test_a_missing_shard_makes_all_ranks_fall_back_together",
        ],
    ),
    "B5": ("steps are numbers", ["core/test_lineage.py::test_steps_are_numbers_not_text"]),
    # Rotation.
    "C1": ("file times order nothing", [f"{NAMED}::test_c1_file_times_order_nothing"]),
    "C2": (
        "the old one goes only when the new one is there",
        [
            f"{MORE}::TestC2TheOldOneStaysUntilTheNewOneIsThere::test_a_failed_upload",
            f"{MORE}::TestC2TheOldOneStaysUntilTheNewOneIsThere::test_a_failed_commit",
            f"{FAULTS}::test_no_fault_loses_a_checkpoint",
        ],
    ),
    "C3": (
        "a fresh run in a used root rotates its own alone",
        [f"{NAMED}::test_c3_a_fresh_run_in_a_used_root_rotates_its_own_alone"],
    ),
    "C4": (
        "rotation remembers across restarts",
        [
            f"{SPINE}::test_retention_keeps_the_newest_and_remembers_across_restarts",
            "core/test_retention.py::test_retention_needs_no_memory",
        ],
    ),
    "C5": (
        "deletions that hang or fail delay nothing",
        [
            f"{STORE}::TestC5DeletesDelayNothing::test_slow_deletes_do_not_delay_writes",
            f"{STORE}::TestC5DeletesDelayNothing::test_a_failed_delete_is_an_error_of_its_own",
            f"{MORE}::test_c5_deletions_that_hang_and_fail_delay_nothing",
        ],
    ),
    # Position in the data.
    "D1": (
        "the order is that of the epoch",
        [f"{LOADER}::test_d1_a_resume_inside_a_later_epoch_uses_that_epochs_order"],
    ),
    "D2": ("epochs after a resume are whole", [f"{LOADER}::test_d2_epochs_after_a_resume_are_whole"]),
    "D3": ("prefetched is not consumed", [f"{LOADER}::test_d3_prefetched_batches_are_not_consumed"]),
    "D4": (
        "lengths that no world size divides",
        [
            f"{LOADER}::test_d4_a_length_that_no_world_size_divides",
            f"{LOADER}::test_d4_a_length_that_no_world_size_divides_with_a_batch_size_per_rank",
        ],
    ),
    "D5": (
        "a position survives resizes",
        [f"{LOADER}::test_d5_a_position_survives_two_resizes_in_one_epoch"],
    ),
    # State that is no tensor.
    "E1": ("plain values keep their types", [f"{TRIP}::test_plain_values_come_back_with_their_types"]),
    "E2": (
        "optimizer state that is not there yet",
        [f"{TRIP}::test_lazy_optimizer_state_is_neither_needed_nor_made"],
    ),
    "E3": (
        "what cannot be saved is named before the first step",
        [
            f"{TRIP}::test_an_unsavable_object_is_named_by_its_path",
            f"{SPINE}::test_state_that_cannot_be_saved_is_refused_with_its_path",
        ],
    ),
    "E4": ("each rank has its own random state", [f"{TRIP}::test_every_generator_repeats_its_own_numbers"]),
    "E5": (
        "random states without pickle, and none that does not fit",
        [
            f"{TRIP}::test_every_generator_repeats_its_own_numbers",
            f"{FUZZ}::test_random_states_that_are_none_are_refused_before_anything_changes",
        ],
    ),
    "E6": ("the loss scale is kept", [f"{TRIP}::test_the_loss_scale_is_kept"]),
    "E7": (
        "the schedule goes on where it was",
        [
            f"{TRIP}::test_model_optimizer_and_scheduler_come_back_bit_for_bit",
            f"{SPINE}::test_a_killed_worker_group_resumes_and_ends_like_an_undisturbed_one",
        ],
    ),
    "E8": ("names carry no wrapper", [f"{TRIP}::test_names_carry_no_wrapper"]),
    # Kinds of tensors.
    "F1": ("odd sizes", [f"{TRIP}::test_every_dense_tensor_comes_back"]),
    "F2": ("views and strides", [f"{TRIP}::test_every_dense_tensor_comes_back"]),
    "F3": (
        "unusual kinds: exact, or refused by name",
        [
            f"{TRIP}::test_every_dense_tensor_comes_back",
            f"{TRIP}::test_what_cannot_be_stored_is_named",
            f"{KINDS}::test_a_quantized_and_a_lazy_tensor_are_refused_by_name",
        ],
    ),
    "F4": (
        "ties hold",
        [
            f"{TRIP}::test_a_tied_weight_is_stored_once",
            f"{KINDS}::test_ties_that_differ_are_refused",
            f"{KINDS}::test_a_tie_holds_over_snapshots_and_restores",
        ],
    ),
    "F5": ("moments keep their dtype", [f"{TRIP}::test_moments_keep_their_dtype"]),
    "F6": (
        "ranks that differ keep their own",
        [
            f"{SPINE}::test_ranks_that_differ_keep_their_own_state",
            f"{TRIP}::test_the_replica_digest_tells_ranks_apart",
            "core/test_protocol.py::test_replicas_that_differ_are_never_committed",
        ],
    ),
    # Memory and isolation.
    "G1": ("memory is flat", [f"{MEMORY}::test_memory_is_flat_over_many_snapshots"]),
    "G2": ("nothing is left after close", [f"{MEMORY}::test_nothing_is_left_after_close"]),
    "G3": (
        "a snapshot is of one step",
        [
            f"{TRIP}::test_a_snapshot_is_of_one_step_while_training_goes_on",
            f"{KINDS}::test_plain_values_are_isolated",
        ],
    ),
    "G4": (
        "a snapshot waits for the writer of the last one",
        [
            f"{FAULTS}::test_no_fault_loses_a_checkpoint",
            "core/test_protocol.py::test_no_history_breaks_the_invariants",
            "model/test_model.py::test_no_interleaving_breaks_a_promise",
        ],
    ),
    "G5": (
        "the memory is the node's",
        [
            f"{MEMORY}::test_the_budget_is_shared_by_the_ranks_of_a_node",
            f"{SPINE}::test_a_node_without_room_refuses_before_the_first_step",
        ],
    ),
    "G6": (
        "uploads do not fight for the interpreter, and what they cost is measured",
        [
            f"{KINDS}::test_a_training_thread_that_never_lets_go_of_the_interpreter",
            "core/test_estimate.py::test_the_overhead_is_what_was_lost",
        ],
    ),
    # Ranks that do not take part.
    "H1": (
        "a rank that does not come is named and holds nobody up",
        [
            f"{MORE}::test_h1_a_rank_that_does_not_come_is_named_and_holds_nobody_up",
            "core/test_protocol.py::test_a_rank_that_never_stages_is_named_at_the_deadline",
            "core/test_protocol.py::test_a_rank_lost_before_staging_ends_the_attempt_at_once",
        ],
    ),
    "H2": ("a save on one rank alone returns", [f"{SPINE}::test_save_and_wait"]),
    "H3": (
        "slow storage trips no watchdog",
        [f"{MORE}::test_h3_slow_storage_on_one_node_trips_no_watchdog"],
    ),
    "H4": ("a forked child uses the store", [f"{STORE}::test_h4_a_forked_child_uses_the_store"]),
    "H5": (
        "event loops stay free",
        [
            f"{STORE}::TestH5EventLoops::test_calls_in_threads_leave_a_loop_free",
            f"{STORE}::TestH5EventLoops::test_a_call_inside_a_loop_works",
        ],
    ),
    # The way to the store.
    "I1": (
        "throttling is waited out, a lasting fault is counted",
        [
            f"{STORE}::TestI1Throttling::test_throttling_is_waited_out",
            f"{STORE}::TestI1Throttling::test_a_lasting_fault_is_one_error",
            "core/test_protocol.py::test_lasting_failures_stop_training_when_the_user_wants_it",
            "core/test_protocol.py::test_a_committed_checkpoint_forgives_earlier_failures",
        ],
    ),
    "I2": ("lookups are retried too", [f"{STORE}::test_i2_a_tenth_of_lookups_fail"]),
    "I3": (
        "credentials that expire",
        [
            f"{STORE}::TestI3ExpiredCredentials::test_an_upload_goes_on_with_new_ones",
            f"{STORE}::TestI3ExpiredCredentials::test_without_new_ones_it_fails_softly",
            f"{STORE}::TestI3ExpiredCredentials::test_a_refresh_reads_the_environment_again",
            f"{STORE}::TestI3ExpiredCredentials::test_secrets_are_never_shown",
        ],
    ),
    "I4": (
        "no uploads are left half done",
        [
            f"{STORE}::TestI4AbandonedUploads::test_cancelling_leaves_none",
            f"{STORE}::TestI4AbandonedUploads::test_a_failure_leaves_none",
            f"{STORE}::TestI4AbandonedUploads::test_a_killed_writer_is_swept",
        ],
    ),
    "I5": ("parts fit the limits", [f"{STORE}::test_i5_many_parts_fit_the_limits"]),
    "I6": (
        "each rank reads its share",
        [
            f"{STORE}::test_i6_each_rank_reads_its_share",
            "runtime/test_restore_choices.py::test_plain_to_sharded_and_back_reads_each_byte_about_once",
        ],
    ),
    # When.
    "J1": ("one clock decides", [f"{MORE}::test_j1_clocks_that_disagree_change_nothing"]),
    "J2": (
        "the bound holds when bandwidth and steps change",
        [
            "core/test_estimate.py::test_a_new_bandwidth_is_followed_within_four_intervals",
            "core/test_estimate.py::test_a_new_step_time_is_followed_within_two_intervals",
            "core/test_interval.py::test_the_bound_and_the_recovery_point_are_kept",
            "runtime/test_tuner.py::test_rare_dear_checkpoints_are_paid_for_until_the_bound_holds_as_measured",
        ],
    ),
    "J3": (
        "a sensible interval for any steps, on the first run too",
        [
            "core/test_interval.py::test_there_is_always_an_answer",
            "core/test_interval.py::test_each_term_can_decide",
            "runtime/test_tuner.py::test_before_anything_is_known_the_first_checkpoint_is_early",
        ],
    ),
    # Another world size.
    "K1": (
        "each rank's own state goes by a rule",
        [
            f"{SPINE}::test_another_world_size_resumes",
            f"{TRIP}::test_any_world_size_restores_any_other",
            "state/test_sharded.py::test_any_sharding_restores_any_other",
        ],
    ),
    "K2": (
        "a resize loads directly, and the data go on",
        [
            "data/test_exactly_once.py::test_every_item_once_per_epoch_over_kills_and_resizes",
            f"{LOADER}::test_a_constant_global_batch_gives_each_step_the_same_items",
        ],
    ),
    # The end of a process.
    "M1": (
        "SIGTERM to a worker: all ranks save one step, and Ray's handler ends it later",
        [
            "ray_jobs/test_sigterm.py::test_a_worker_that_is_told_to_end_saves_first",
            "runtime/test_notices.py::test_sigterm_saves_and_ends_the_worker_later",
            "runtime/test_notices.py::test_without_a_checkpointer_sigterm_ends_at_once",
        ],
    ),
    "M2": (
        "a notice is used at once, and again before the end",
        [
            "runtime/test_notices.py::test_one_checkpoint_at_once_and_one_that_is_durable_before_the_end",
            "runtime/test_notices.py::test_a_spot_notice_saves_at_once_and_again_before_the_end",
            "ray_jobs/test_elastic.py::test_growth_loses_no_step_and_a_drained_node_no_failure",
        ],
    ),
    "M3": (
        "what is under way at the end is stored, and errors come out as they were",
        [
            f"{SPINE}::test_an_exception_is_not_masked_and_does_not_wait",
            f"{SPINE}::test_the_end_of_training_is_checkpointed",
            f"{SPINE}::test_a_staged_snapshot_is_committed_after_its_workers_died",
            f"{MORE}::test_m3_what_is_under_way_when_training_ends_in_an_error_is_stored",
        ],
    ),
    # Disks.
    "N1": (
        "a full disk costs one save",
        [f"{STORE}::test_n1_a_full_disk_is_a_soft_failure", f"{MORE}::test_n1_a_full_disk_costs_one_save"],
    ),
    "N2": (
        "nothing piles up outside the store",
        [
            f"{MORE}::test_n2_nothing_piles_up_outside_the_store",
            f"{SPINE}::test_memory_is_gone_after_every_kind_of_end",
            "store/test_contract.py::test_left_over_local_files_are_swept",
        ],
    ),
    # Places.
    "O1": ("a URL is no path", [f"{STORE}::test_o1_a_url_is_never_a_local_folder"]),
    "O2": (
        "all spellings of a root are one",
        [
            f"{STORE}::test_o2_all_spellings_of_a_root_are_one",
            "store/test_location.py::test_urls_are_normalised",
        ],
    ),
    "O3": (
        "awkward prefixes, and neighbours",
        [
            f"{STORE}::test_o3_awkward_prefixes_round_trip",
            f"{STORE}::test_o3_what_cannot_work_is_refused_at_start",
            f"{NAMED}::TestSweep::test_neighbours_are_left_alone",
        ],
    ),
    "O4": (
        "placeholders are nothing",
        [
            f"{STORE}::test_o4_placeholders_are_no_objects",
            f"{NAMED}::test_o4_placeholders_are_no_checkpoints",
        ],
    ),
    "O5": (
        "the store needs fsspec alone; what Ray Train is given lies in its run's folder",
        [
            f"{STORE}::test_o5_the_store_needs_fsspec_alone",
            "ray_jobs/test_registration.py::test_ray_train_has_our_checkpoints_through_restart_and_resubmission",
        ],
    ),
    # What is read back.
    "P1": (
        "nothing that is read back runs",
        [
            f"{NAMED}::test_p1_nothing_is_unpickled",
            f"{TRIP}::test_pickle_only_for_types_that_the_user_names",
            f"{FUZZ}::test_a_slice_of_every_parser",
        ],
    ),
    "P2": (
        "every byte is verified, and a missing checksum is a fault",
        [
            f"{SPINE}::test_damaged_bytes_are_found_before_any_weight_changes",
            "core/test_layout.py::test_a_damaged_or_forged_manifest_is_refused",
            "core/test_restore_vote.py::test_one_bad_rank_takes_all_to_the_older_one",
        ],
    ),
}
"""For each case what is right, in a few words, and the tests that prove it."""

OPEN: dict[str, str] = {}
"""Cases of features that are not there."""

PARTLY_OPEN = {
    "G2": "pinned memory on a GPU: no such memory is registered yet",
    "G6": "the slow-down of steps is measured by the benchmarks, on the machine at hand",
    "I4": "an upload that a killed writer left is swept at a start; no command lists it",
    "M3": "the shutdown of an interpreter in the middle of an upload is the agent's death, tested as such",
    "M1": "a long evaluation or compilation takes no step, so that nothing is saved before it ends",
    "M2": "survivors do not write the share of a rank that vanishes; a real node's drain is tested on demand",
    "O5": "one Ray is supported and tried, the newest: 2.60",
}
"""Of a proven case, what is left to other tests or to features that are not there."""

KINDS_OF_CASES = {
    "A": 6,
    "B": 5,
    "C": 5,
    "D": 5,
    "E": 8,
    "F": 6,
    "G": 6,
    "H": 5,
    "I": 6,
    "J": 3,
    "K": 2,
    "M": 3,
    "N": 2,
    "O": 5,
    "P": 2,
}


def test_every_case_is_proven_or_open():
    """All 69 are here, each once; an open one says why."""
    wanted = {f"{kind}{number}" for kind, count in KINDS_OF_CASES.items() for number in range(1, count + 1)}
    assert len(wanted) == 69
    assert CASES.keys() | OPEN.keys() == wanted
    assert not CASES.keys() & OPEN.keys()
    assert PARTLY_OPEN.keys() <= CASES.keys()
    assert all(what and tests for what, tests in CASES.values())
    assert all(OPEN.values())


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_tests_of_a_case_exist(case):
    """A test that was renamed or removed takes its case along into the open: say so here."""
    missing = [
        name for name in CASES[case][1] if name.partition("::")[2] not in _names_in(name.partition("::")[0])
    ]
    assert missing == []


@functools.cache
def _names_in(module: str) -> frozenset[str]:
    """Return the tests of a module, as pytest names them, without importing it."""
    found = set()
    for node in ast.parse((_TESTS / module).read_text()).body:
        if _is_test(node):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if _is_test(inner)}
    return frozenset(found)


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
