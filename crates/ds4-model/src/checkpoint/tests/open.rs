use crate::checkpoint::{Checkpoint, CheckpointError, Dtype};

#[cfg(unix)]
use super::repository;
use super::{
    checkpoint_of, checkpoint_of_bytes, empty_checkpoint, safetensors, stored, stored_f32,
    with_header,
};

fn refused(file: &[u8]) -> CheckpointError {
    let dir = checkpoint_of_bytes(file);
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    error
}

fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

#[test]
fn tensors_are_listed_by_name_with_type_shape_bytes_and_file() {
    let checkpoint = checkpoint_of(&[
        stored("b", "F8_E8M0", &[3], &[126, 127, 128]),
        stored_f32("a", &[1, 2], &[1.0, -2.0]),
    ]);
    let listed: Vec<_> = checkpoint
        .tensors()
        .map(|tensor| {
            (
                tensor.name,
                tensor.dtype,
                tensor.shape.to_vec(),
                tensor.bytes.to_vec(),
            )
        })
        .collect();
    let a = vec![0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0];
    assert_eq!(
        listed,
        vec![
            ("a", Dtype::F32, vec![1, 2], a),
            ("b", Dtype::F8_E8M0, vec![3], vec![126, 127, 128]),
        ]
    );
    assert_eq!(checkpoint.tensors().len(), 2);
    let tensor = checkpoint.tensor("b").unwrap();
    assert_eq!(tensor.shard.file_name().unwrap(), "model.safetensors");
    assert!(checkpoint.tensor("c").is_none());
    assert_eq!(checkpoint.config().vocab_size, 1024);
}

#[test]
fn a_directory_without_config_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Config(_)), "{error}");
    assert!(error.to_string().contains("config.json"), "{error}");
}

#[test]
fn a_directory_without_weights_is_refused() {
    let dir = empty_checkpoint();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NoWeights { .. }),
        "{error}"
    );
}

#[test]
fn a_directory_in_place_of_the_weight_file_is_refused() {
    let dir = empty_checkpoint();
    std::fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Read { .. }), "{error}");
}

#[cfg(unix)]
#[test]
fn a_fifo_in_place_of_any_file_is_refused_and_not_waited_for() {
    for name in [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ] {
        let dir = empty_checkpoint();
        let path = repository::fifo(dir.path(), name);
        let error = repository::in_time(move || Checkpoint::open(dir.path()).unwrap_err());
        let expected = format!("{}: cannot be read: not a regular file", path.display());
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_file_too_short_for_a_header_is_refused() {
    for length in 0..8 {
        let error = refused(&vec![1; length]);
        assert!(matches!(error, CheckpointError::NoHeader { .. }), "{error}");
    }
}

#[test]
fn a_header_length_beyond_the_file_is_refused() {
    for declared in [3, 100_000_001, u64::from(u32::MAX), u64::MAX - 7, u64::MAX] {
        let mut file = declared.to_le_bytes().to_vec();
        file.extend_from_slice(b"{}");
        let error = refused(&file);
        assert!(
            matches!(
                error,
                CheckpointError::HeaderLength { declared: d, length: 10, .. } if d == declared
            ),
            "{error}"
        );
    }
}

#[test]
fn a_truncated_file_is_refused() {
    let file = safetensors(&[stored_f32("a", &[2], &[1.0, 2.0])]);
    let error = refused(&file[..file.len() - 1]);
    assert!(
        matches!(
            error,
            CheckpointError::DataLength {
                expected: 8,
                actual: 7,
                ..
            }
        ),
        "{error}"
    );
    let mut longer = file.clone();
    longer.push(0);
    let error = refused(&longer);
    assert!(
        matches!(
            error,
            CheckpointError::DataLength {
                expected: 8,
                actual: 9,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_header_that_is_not_the_right_json_is_refused() {
    let headers = [
        "",
        "{",
        "[]",
        "{\"a\":3}",
        "{\"a\":{\"dtype\":\"F32\"}}",
        "{\"a\":{\"dtype\":\"F99\",\"shape\":[],\"data_offsets\":[0,4]}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}",
    ];
    for header in headers {
        let error = refused(&with_header(header, &[0; 4]));
        assert!(
            matches!(error, CheckpointError::Header { .. }),
            "{header}: {error}"
        );
    }
    let mut file = 2u64.to_le_bytes().to_vec();
    file.extend_from_slice(&[0xff, 0xfe]);
    let error = refused(&file);
    assert!(matches!(error, CheckpointError::Header { .. }), "{error}");
}

#[test]
fn offsets_that_overlap_leave_gaps_or_do_not_fit_the_shape_are_refused() {
    let a = entry("a", "F32", "[2]", 0, 8);
    let seconds = [
        entry("b", "F32", "[2]", 4, 12),
        entry("b", "F32", "[2]", 0, 8),
        entry("b", "F32", "[2]", 12, 20),
        entry("b", "F32", "[2]", 16, 8),
        entry("b", "F32", "[3]", 8, 16),
        entry("b", "F32", "[4611686018427387904,4]", 8, 16),
    ];
    for second in seconds {
        let error = refused(&with_header(&format!("{{{a},{second}}}"), &[0; 16]));
        assert!(
            matches!(error, CheckpointError::Header { .. }),
            "{second}: {error}"
        );
    }
}

#[test]
fn offsets_beyond_the_file_are_refused_even_where_their_sum_overflows() {
    let eighth = (1u64 << 61) - 1;
    let mut entries: Vec<String> = (0..8)
        .map(|i| {
            let shape = format!("[{eighth}]");
            entry(&format!("t{i}"), "U8", &shape, i * eighth, (i + 1) * eighth)
        })
        .collect();
    entries.push(entry("t8", "U8", "[7]", 8 * eighth, 8 * eighth + 7));
    let error = refused(&with_header(
        &format!("{{{}}}", entries.join(",")),
        &[0; 16],
    ));
    assert!(
        matches!(error, CheckpointError::DataLength { .. }),
        "{error}"
    );
}

#[test]
fn a_tensor_listed_twice_in_a_header_is_refused() {
    let a = entry("a", "F32", "[2]", 0, 8);
    let error = refused(&with_header(&format!("{{{a},{a}}}"), &[0; 8]));
    assert!(matches!(error, CheckpointError::Header { .. }), "{error}");
    assert!(error.to_string().contains("duplicate entry `a`"), "{error}");
}

#[test]
fn tensors_of_a_drafter_that_the_configuration_does_not_have_are_refused() {
    for name in [
        "mtp.0.main_proj.weight",
        "mtp.0.main_norm.weight",
        "mtp.1.attn_norm.weight",
        "mtp.2.norm.weight",
        "mtp.2.markov_head.markov_w1",
        "mtp.0.confidence_head.proj",
    ] {
        let dir = checkpoint_of_bytes(&safetensors(&[
            stored_f32("norm.weight", &[1], &[1.0]),
            stored_f32(name, &[1], &[1.0]),
        ]));
        let error = Checkpoint::open(dir.path()).unwrap_err();
        let CheckpointError::UnknownDspark { tensors, .. } = &error else {
            panic!("{name}: {error}");
        };
        assert_eq!(tensors, &[name]);
        assert!(error.to_string().contains("DSpark"), "{error}");
    }
}

#[test]
fn a_file_without_tensors_opens_as_empty() {
    let dir = checkpoint_of_bytes(&with_header("{\"__metadata__\":{\"format\":\"pt\"}}", &[]));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensors().len(), 0);
}

#[test]
fn a_gguf_file_is_called_so_whatever_leads_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = b"GGUF".to_vec();
    file.extend([3, 0, 0, 0, 9, 0, 0, 0]);
    let named = dir.path().join("V4-Flash-Q4_K.gguf");
    let other = dir.path().join("weights");
    std::fs::write(&named, &file).unwrap();
    std::fs::write(&other, &file).unwrap();
    for (asked, found) in [(dir.path(), &named), (&named, &named), (&other, &other)] {
        let error = Checkpoint::open(asked).unwrap_err();
        let CheckpointError::Gguf { path } = &error else {
            panic!("{error}");
        };
        assert_eq!(path, found);
        let text = error.to_string();
        assert!(
            text.contains("GGUF") && text.contains("hf download"),
            "{text}"
        );
    }
    // Under another name, and beside weights that are read.
    assert!(matches!(refused(&file), CheckpointError::Gguf { .. }));
    let dir = checkpoint_of_bytes(&safetensors(&[]));
    std::fs::copy(&named, dir.path().join("a.gguf")).unwrap();
    Checkpoint::open(dir.path()).unwrap();
}
