//! Writing of a file.

use std::collections::HashMap;

use burn::tensor::DType;
use burn_ds4_ops::flash_head::FlashHead;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::fingerprint;
use super::keys::{
    ASSIGNMENTS, CAPACITY_KEY, CENTROIDS, FINGERPRINT_KEY, NORMS, SEED_KEY, SPECIAL_KEY, VERSION,
    VERSION_KEY,
};

pub(super) fn encode(head: &FlashHead, seed: Option<u64>) -> Result<Vec<u8>, String> {
    let special: Vec<String> = head.special_tokens().iter().map(u32::to_string).collect();
    let mut metadata = HashMap::from([
        (VERSION_KEY.to_owned(), VERSION.to_owned()),
        (CAPACITY_KEY.to_owned(), head.capacity().to_string()),
        (SPECIAL_KEY.to_owned(), special.join(",")),
        (FINGERPRINT_KEY.to_owned(), fingerprint::of_head(head)),
    ]);
    metadata.extend(seed.map(|seed| (SEED_KEY.to_owned(), seed.to_string())));
    let assignments: Vec<u8> = head
        .assignments()
        .iter()
        .flat_map(|cluster| cluster.to_le_bytes())
        .collect();
    let (centroids, norms) = (head.centroids().into_data(), head.norms().into_data());
    let dtype = match centroids.dtype() {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        _ => Dtype::F32,
    };
    let view = |dtype, shape: &[usize], bytes| {
        TensorView::new(dtype, shape.to_vec(), bytes).map_err(|error| error.to_string())
    };
    let tensors = [
        (
            ASSIGNMENTS,
            view(Dtype::U32, &[head.vocabulary()], &assignments)?,
        ),
        (
            CENTROIDS,
            view(dtype, centroids.shape().as_slice(), centroids.as_bytes())?,
        ),
        (
            NORMS,
            view(Dtype::F32, norms.shape().as_slice(), norms.as_bytes())?,
        ),
    ];
    safetensors::serialize(tensors, Some(metadata)).map_err(|error| error.to_string())
}
