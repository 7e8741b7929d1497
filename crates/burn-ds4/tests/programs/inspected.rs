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
