use std::path::Path;

use crate::checkpoint::{Checkpoint, CheckpointError, Form};

use super::fixtures::load_model;
use super::{StoredTensor, empty_checkpoint, repository, safetensors, stored_f32};

fn write_index(dir: &Path, entries: &[(&str, &str)]) {
    let entries: Vec<String> = entries
        .iter()
        .map(|(tensor, shard)| format!("\"{tensor}\": {}", serde_json::json!(shard)))
        .collect();
    let index = format!(
        r#"{{"metadata": {{"total_size": 1}}, "weight_map": {{{}}}}}"#,
        entries.join(", ")
    );
    std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
}

fn write_shard(dir: &Path, shard: &str, tensors: &[StoredTensor]) {
    std::fs::write(dir.join(shard), safetensors(tensors)).unwrap();
}

fn one(name: &str) -> StoredTensor {
    stored_f32(name, &[1], &[1.0])
}

#[test]
fn shards_give_the_weights_of_the_single_file() {
    let single = Checkpoint::open(&repository::path("assets/ds4-tiny")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let sharded = single.convert(Form::Released, dir.path(), 4_000_000, |_, _| {});
    let sharded = sharded.unwrap();
    assert_eq!(sharded.shards.len(), 3);
    assert_eq!(sharded.tensors().len(), single.tensors().len());
    for (one, other) in sharded.tensors().zip(single.tensors()) {
        assert_eq!((one.name, one.dtype), (other.name, other.dtype));
        assert!(one.bytes == other.bytes && one.shard != other.shard);
    }
    assert_eq!(load_model(&sharded), load_model(&single));
}

#[test]
fn shards_that_do_not_exist_are_all_named() {
    let dir = empty_checkpoint();
    write_shard(dir.path(), "1.safetensors", &[one("a")]);
    write_index(
        dir.path(),
        &[
            ("c", "3.safetensors"),
            ("b", "2.safetensors"),
            ("a", "1.safetensors"),
        ],
    );
    let error = Checkpoint::open(dir.path()).unwrap_err();
    let CheckpointError::MissingShards { shards, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(shards, &["2.safetensors", "3.safetensors"]);
    assert!(error.to_string().contains("index.json"), "{error}");
}

#[test]
fn shards_outside_the_directory_are_refused() {
    let dir = empty_checkpoint();
    for shard in [
        "../other/model.safetensors",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "./model.safetensors",
        "model.safetensors/",
        "..",
        ".",
        "",
    ] {
        write_index(dir.path(), &[("a", shard)]);
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(
            matches!(&error, CheckpointError::ShardName { shard: named, .. } if named == shard),
            "{shard}: {error}"
        );
    }
}

#[test]
fn tensors_that_are_not_in_their_shards_are_all_named() {
    let dir = empty_checkpoint();
    write_shard(dir.path(), "1.safetensors", &[one("a"), one("moved")]);
    write_shard(dir.path(), "2.safetensors", &[one("b")]);
    write_index(
        dir.path(),
        &[
            ("moved", "2.safetensors"),
            ("a", "1.safetensors"),
            ("b", "2.safetensors"),
            ("gone", "1.safetensors"),
        ],
    );
    let error = Checkpoint::open(dir.path()).unwrap_err();
    let CheckpointError::NotInShard { tensors, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(tensors, &["gone (1.safetensors)", "moved (2.safetensors)"]);
}

#[test]
fn the_index_says_which_of_two_copies_of_a_tensor_counts() {
    for (owner, value) in [("1.safetensors", 1.0_f32), ("2.safetensors", 2.0)] {
        let dir = empty_checkpoint();
        write_shard(dir.path(), "1.safetensors", &[one("a"), one("b")]);
        let newer = stored_f32("b", &[1], &[2.0]);
        write_shard(dir.path(), "2.safetensors", &[newer, one("c")]);
        write_index(
            dir.path(),
            &[("a", "1.safetensors"), ("b", owner), ("c", "2.safetensors")],
        );
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.tensors().len(), 3);
        let b = checkpoint.tensor("b").unwrap();
        assert_eq!(b.bytes, value.to_le_bytes());
        assert!(b.shard.ends_with(owner), "{owner}");
    }
}

#[test]
fn a_tensor_in_two_shards_that_the_index_does_not_have_is_refused() {
    let dir = empty_checkpoint();
    write_shard(dir.path(), "1.safetensors", &[one("a"), one("b")]);
    write_shard(dir.path(), "2.safetensors", &[one("b"), one("c")]);
    write_index(
        dir.path(),
        &[("a", "1.safetensors"), ("c", "2.safetensors")],
    );
    let error = Checkpoint::open(dir.path()).unwrap_err();
    let CheckpointError::DuplicateTensor {
        name,
        first,
        second,
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(name, "b");
    assert!(first.ends_with("1.safetensors") && second.ends_with("2.safetensors"));
}

#[test]
fn a_tensor_listed_twice_in_the_index_is_refused() {
    let dir = empty_checkpoint();
    write_shard(dir.path(), "1.safetensors", &[one("a")]);
    write_index(
        dir.path(),
        &[("a", "1.safetensors"), ("a", "1.safetensors")],
    );
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Index { .. }), "{error}");
    assert!(error.to_string().contains("duplicate entry `a`"), "{error}");
}

#[test]
fn an_index_of_another_form_is_refused() {
    let dir = empty_checkpoint();
    for index in [
        "",
        "{}",
        "[]",
        "{\"weight_map\": 3}",
        "{\"weight_map\": {\"a\": 1}}",
        "{\"weight_map\": {}}",
    ] {
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Index { .. }),
            "{index}: {error}"
        );
    }
}

#[test]
fn names_of_an_index_cannot_control_a_terminal() {
    let dir = empty_checkpoint();
    write_shard(dir.path(), "1.safetensors", &[one("a")]);
    for (tensor, shard) in [
        (r"\u001b[2J", "1.safetensors"),
        (r"\u001b[2J", "../\u{7f}"),
        ("a", "\u{9b}2J"),
    ] {
        write_index(dir.path(), &[(tensor, shard)]);
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(!error.contains(char::is_control), "{error:?}");
        assert!(error.contains(r"\u{"), "{error}");
    }
}

#[test]
fn a_damaged_shard_is_named() {
    let dir = empty_checkpoint();
    write_shard(dir.path(), "1.safetensors", &[one("a")]);
    std::fs::write(dir.path().join("2.safetensors"), b"short").unwrap();
    write_index(
        dir.path(),
        &[("a", "1.safetensors"), ("b", "2.safetensors")],
    );
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::NoHeader { .. }), "{error}");
    assert!(error.to_string().contains("2.safetensors"), "{error}");
}

#[test]
fn tensors_that_only_a_shard_knows_are_kept() {
    let dir = empty_checkpoint();
    write_shard(dir.path(), "1.safetensors", &[one("a"), one("b")]);
    write_index(dir.path(), &[("a", "1.safetensors")]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.tensor("b").is_some());
}
