//! What `inspect` says of a checkpoint that would not load.

use burn::tensor::Device;
use ds4_model::checkpoint::{Checkpoint, LoadOptions};
use safetensors::SafeTensors;

use crate::cli::run;
use crate::golden::copy;

#[test]
fn what_would_not_load_has_no_size() {
    let dir = copy(&[]);
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).expect("a copy");
    let tensors = SafeTensors::deserialize(&file).expect("the asset is valid");
    let names = ["layers.1.attn.wkv.scale", "layers.1.attn.wkv.scales"];
    let tensors = tensors.iter().map(|(name, tensor)| {
        let name = if name == names[0] { names[1] } else { name };
        (name.to_owned(), tensor)
    });
    let renamed = safetensors::serialize(tensors.collect::<Vec<_>>(), None);
    std::fs::write(&path, renamed.expect("valid tensors")).expect("the directory is writable");
    let checkpoint = Checkpoint::open(dir.path()).expect("the headers are valid");
    let counted = checkpoint.weight_bytes(&LoadOptions::default(), &Device::flex());
    let counted = counted.expect_err("a damaged checkpoint").to_string();
    assert!(names.iter().all(|name| counted.contains(name)), "{counted}");
    let path = dir.path().to_str().expect("a UTF-8 path");
    let inspected = run("inspect", &["--model", path]);
    assert_eq!(
        (inspected.code, &*inspected.stdout),
        (1, ""),
        "{inspected:?}"
    );
    assert!(inspected.stderr.contains(&counted), "{inspected:?}");
}

#[test]
fn names_and_what_is_not_loaded_are_told() {
    let dir = copy(&[]);
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).expect("a copy");
    let tensors = SafeTensors::deserialize(&file).expect("the asset is valid");
    let image = tensors.tensor("norm.weight").expect("every model has one");
    let named = tensors.iter();
    let mut named: Vec<_> = named
        .map(|(name, tensor)| (format!("model.{name}"), tensor))
        .collect();
    named.push(("model.vision.norm.weight".to_owned(), image));
    let written = safetensors::serialize(named, None).expect("valid tensors");
    std::fs::write(&path, written).expect("the directory is writable");
    let model = dir.path().to_str().expect("a UTF-8 path");
    let inspected = run("inspect", &["--model", model]);
    assert_eq!(inspected.code, 0, "{inspected:?}");
    for told in [
        "of the release, with a prefix",
        "images, not loaded",
        "672 in FP4; 61 in FP8 with F8_E8M0 scales",
        "FP4 experts, MTP layer (first release), images (Vision-Exp)",
    ] {
        assert!(inspected.stdout.contains(told), "{inspected:?}");
    }
}

#[test]
fn what_layers_of_v41_share_is_told() {
    let path = crate::golden::root().join("tests/fixtures/v41-goldens");
    let inspected = run(
        "inspect",
        &["--model", path.to_str().expect("a UTF-8 path")],
    );
    assert_eq!(inspected.code, 0, "{inspected:?}");
    for told in [
        "6 (1 window, 5 sharing the rows of 2 and the picks of 3), DSpark with 3 layers",
        "4 blocks of 4 rows, by layer 3",
        "tables of [384, 552] rows before layers [1, 4]",
        "in FP8 with scales of 32x32\n",
        "FP4 experts, DSpark drafter (V4.1), images",
    ] {
        assert!(inspected.stdout.contains(told), "{told}: {inspected:?}");
    }
}

#[test]
fn every_command_says_that_a_gguf_file_is_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model-Q4_K.gguf");
    std::fs::write(&path, b"GGUF\x03\0\0\0").expect("the directory is writable");
    for model in [dir.path(), &path] {
        let model = model.to_str().expect("a UTF-8 path");
        for (command, arguments) in [
            ("inspect", &[][..]),
            ("generate", &["--device", "flex", "-p", "Hello"]),
            ("chat", &["--device", "flex"]),
            ("serve", &["--device", "flex"]),
        ] {
            let ended = run(command, &[&["--model", model], arguments].concat());
            assert_eq!(
                (ended.code, &*ended.stdout),
                (1, ""),
                "{command}: {ended:?}"
            );
            assert!(
                ended.stderr.contains("is a GGUF file"),
                "{command}: {ended:?}"
            );
        }
    }
}

#[test]
fn a_drafter_without_tensors_is_warned_of_once() {
    let dir = copy(&[]);
    let path = dir.path().join("model.safetensors");
    let file = std::fs::read(&path).expect("a copy");
    let tensors = SafeTensors::deserialize(&file).expect("the asset is valid");
    let trunk = tensors.iter().filter(|(name, _)| !name.starts_with("mtp."));
    let written = safetensors::serialize(trunk, None).expect("valid tensors");
    std::fs::write(&path, written).expect("the directory is writable");
    let model = dir.path().to_str().expect("a UTF-8 path");
    let inspected = run("inspect", &["--model", model]);
    assert_eq!(inspected.code, 0, "{inspected:?}");
    assert!(inspected.stdout.contains("0 MTP"), "{inspected:?}");
    let warnings = inspected.stderr.matches("names an MTP layer").count();
    assert_eq!(warnings, 1, "{inspected:?}");
}
