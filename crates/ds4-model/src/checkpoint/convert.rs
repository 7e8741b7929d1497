//! Checkpoints written in another form.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use half::bf16;
use safetensors::tensor::View;
use safetensors::{Dtype, SafeTensorError};
use serde_json::{Map, Value, json};

use super::directory::{CONFIG_FILE, Checkpoint, CheckpointTensor, INDEX_FILE, is_apart};
use super::error::CheckpointError;
use super::format::{FP4_BLOCK, StoredLinear, WeightFormat};
use super::names::{self, DRAFTER};
use super::packed::PackedLinear;
use super::progress::LoadProgress;

/// Says in a directory which conversion is not complete there.
const MARKER: &str = "conversion.json";

/// The form in which a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Names and formats of the released checkpoints. NVFP4 becomes FP4 where its scales fold, and
    /// F32 where they do not.
    Released,
    /// Released names and no packed weight: BF16 where that is exact, else F32. Tables of engrams
    /// stay as they are.
    Dense,
    /// The names of Hugging Face `transformers`, with all experts of a layer in one tensor, and the
    /// formats of [`Released`](Self::Released). What drafts keeps its names.
    Transformers,
}

type Content<'a> = Box<dyn Fn() -> Cow<'a, [u8]> + 'a>;

/// A tensor that is written, of parts behind each other.
struct Written<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    parts: Vec<Content<'a>>,
}

impl View for &Written<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match &self.parts[..] {
            [part] => part(),
            parts => {
                let mut all = Vec::with_capacity(self.data_len());
                parts.iter().for_each(|part| all.extend_from_slice(&part()));
                all.into()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl<'a> Written<'a> {
    /// `None` for scales that have no place in the form.
    fn new(
        tensor: CheckpointTensor<'a>,
        packed: &BTreeMap<&str, PackedLinear<'a>>,
        form: Form,
    ) -> Option<Self> {
        let (prefix, end) = tensor.name.rsplit_once('.').unwrap_or_default();
        let mut written = Self {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            parts: vec![Box::new(move || Cow::Borrowed(tensor.bytes))],
        };
        let Some(&PackedLinear(linear, inp, held)) = packed.get(prefix) else {
            return Some(written);
        };
        let out = linear.weight.shape[0];
        let is_dense = form == Form::Dense || held == WeightFormat::F32;
        match end {
            "weight" if is_dense => {
                (written.dtype, written.shape) = (linear.dense_dtype(held), vec![out, inp]);
                written.parts = vec![values(linear, inp, written.dtype)];
            }
            "weight" if held == WeightFormat::Fp4 => {
                (written.dtype, written.shape) = (Dtype::I8, vec![out, inp.div_ceil(2)]);
            }
            "scale" if held == WeightFormat::Fp4 && !is_dense => {
                let blocks = inp.div_ceil(FP4_BLOCK);
                (written.dtype, written.shape) = (Dtype::F8_E8M0, vec![out, blocks]);
                let scales = move || linear.fp4_scales(inp).unwrap_or_default();
                written.parts = vec![Box::new(scales)];
            }
            "scale" if is_dense => return None,
            "weight_scale_2" | "weight_global_scale" => return None,
            _ => {}
        }
        Some(written)
    }
}

/// Decoded weights of so many columns.
fn values(linear: StoredLinear<'_>, inp: usize, dtype: Dtype) -> Content<'_> {
    Box::new(move || {
        let mut values = vec![0.0; linear.weight.shape[0] * inp];
        linear.expand(inp, &mut values);
        let values = values.into_iter();
        let short = |value| bf16::from_f32(value).to_le_bytes();
        match dtype {
            Dtype::BF16 => values.flat_map(short).collect(),
            _ => values.flat_map(f32::to_le_bytes).collect(),
        }
    })
}

/// Writes another file and renames it, unless there is one: no name has a part of the content.
fn whole(
    path: &Path,
    write: impl FnOnce(&Path) -> Result<(), SafeTensorError>,
) -> Result<(), CheckpointError> {
    if path.exists() {
        return Ok(());
    }
    let temporary = path.with_extension("partial");
    // What a process has left that was killed may not be writable.
    let _ = fs::remove_file(&temporary);
    let written = write(&temporary)
        .and_then(|()| Ok(File::open(&temporary)?.sync_all()?))
        .and_then(|()| Ok(fs::rename(&temporary, path)?));
    written.map_err(|error| {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
        match error {
            SafeTensorError::IoError(source) => failed(path, source),
            error => failed(path, io::Error::other(error)),
        }
    })
}

fn failed(path: &Path, source: io::Error) -> CheckpointError {
    let path = path.to_path_buf();
    CheckpointError::Write { path, source }
}

impl Checkpoint {
    /// Writes the checkpoint to the directory `target` in another form, in shards of so many bytes
    /// about, and opens it there. What [`skipped`](Self::skipped) names is left out.
    ///
    /// Each tensor is in memory on its own. A file appears under its name when it is whole, and the
    /// index of the shards last. A conversion that was interrupted goes on where it was when it is
    /// called again with the same source. Other files of the source, such as the tokenizer, are
    /// copied; `config.json` is, too, but for what it says of formats.
    ///
    /// # Errors
    /// [`CheckpointError::TargetExists`] where the directory has other files,
    /// [`CheckpointError::NotConverted`] for one of V4.1 to the names of `transformers`,
    /// [`CheckpointError::Write`], and those of [`open`](Self::open). Tensors that are missing or
    /// damaged are found by who loads the result.
    pub fn convert(
        &self,
        form: Form,
        target: &Path,
        shard_bytes: usize,
        mut progress: impl LoadProgress,
    ) -> Result<Self, CheckpointError> {
        if self.config.has_v41_parts() && form == Form::Transformers {
            let dir = self.dir.clone();
            return Err(CheckpointError::NotConverted { dir });
        }
        let packed = self.packed();
        let kept = self.tensors().filter(|of| self.skipped(of.name).is_none());
        let kept = kept.filter_map(|tensor| Written::new(tensor, &packed, form));
        let written = match form {
            Form::Transformers => self.stacked(kept),
            Form::Released | Form::Dense => kept.collect(),
        };
        let mut total = 0;
        let numbered = written.into_iter().map(|tensor| {
            let number = total / shard_bytes.max(1);
            total += (&tensor).data_len();
            (number, tensor)
        });
        let numbered: Vec<_> = numbered.collect();
        let shards: Vec<_> = numbered.chunk_by(|one, other| one.0 == other.0).collect();

        fs::create_dir_all(target).map_err(|source| failed(target, source))?;
        let found = fs::read_dir(target).map_err(|source| failed(target, source))?;
        let marker = target.join(MARKER);
        let begun = marker.with_extension("partial");
        let is_empty = found.flatten().all(|entry| entry.path() == begun);
        let told = format!("{form:?} {shard_bytes} {:?}", self.stamps());
        match fs::read_to_string(&marker) {
            Ok(found) if found == told => {}
            Err(_) if is_empty => {
                whole(&marker, |path| Ok(fs::write(path, &told)?))?;
            }
            _ => {
                let path = target.to_path_buf();
                return Err(CheckpointError::TargetExists { path });
            }
        }
        let mut map = Map::new();
        let mut done = 0;
        for (number, shard) in shards.iter().enumerate() {
            let file = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
            let named = shard.iter().map(|(_, tensor)| (&tensor.name, tensor));
            let format = [("format".to_owned(), "pt".to_owned())];
            whole(&target.join(&file), |path| {
                safetensors::serialize_to_file(named.clone(), Some(format.into()), path)
            })?;
            for (name, tensor) in named {
                map.insert(name.clone(), json!(file));
                done += tensor.data_len() as u64;
            }
            progress.update(done, total as u64);
        }
        progress.finish();
        self.copy_others(form, &packed, target)?;
        let index = json!({"metadata": {"total_size": total}, "weight_map": map}).to_string();
        whole(&target.join(INDEX_FILE), |path| Ok(fs::write(path, index)?))?;
        fs::remove_file(&marker).map_err(|source| failed(&marker, source))?;
        Self::open(target)
    }

    /// What tells the files from others, also from those that they may become.
    pub(super) fn stamps(&self) -> Vec<impl std::fmt::Debug> {
        let stamp = |path: &Path| {
            let metadata = path.metadata().ok()?;
            Some((metadata.len(), metadata.modified().ok()))
        };
        let paths = self.shards.iter().map(|shard| shard.path().to_path_buf());
        let paths = paths.chain([self.dir.join(CONFIG_FILE)]);
        paths.map(|path| (stamp(&path), path)).collect()
    }

    /// All experts of a layer in one tensor, where they are alike, and the names of `transformers`.
    fn stacked<'a>(&self, tensors: impl Iterator<Item = Written<'a>>) -> Vec<Written<'a>> {
        let mut groups: BTreeMap<String, BTreeMap<[usize; 2], Written<'a>>> = BTreeMap::new();
        for tensor in tensors {
            let stack = names::stack_of(&tensor.name);
            let stack = stack.filter(|_| !tensor.name.starts_with(DRAFTER));
            let (name, place) = stack.unwrap_or_else(|| (tensor.name.clone(), [usize::MAX; 2]));
            groups.entry(name).or_default().insert(place, tensor);
        }
        let experts = self.config.n_routed_experts;
        let mut stacks = Vec::new();
        for (name, group) in groups {
            let are_all = group.keys().all(|[expert, _]| *expert < experts);
            let mut tensors: Vec<_> = group.into_values().collect();
            let (dtype, shape) = (tensors[0].dtype, tensors[0].shape.clone());
            let stack = names::STACKS.iter().find(|stack| name.ends_with(stack.end));
            if let Some(count) = stack.map(|stack| stack.parts.len())
                && are_all
                && let [out, inp] = shape[..]
                && tensors.len() == experts * count
                && tensors
                    .iter()
                    .all(|of| of.dtype == dtype && of.shape == shape)
                && is_apart(count, count * out, self.config.moe_intermediate_size)
            {
                tensors = vec![Written {
                    name,
                    dtype,
                    shape: vec![experts, count * out, inp],
                    parts: tensors.into_iter().flat_map(|of| of.parts).collect(),
                }];
            }
            stacks.extend(tensors);
        }
        for tensor in &mut stacks {
            tensor.name = names::transformers(&tensor.name);
        }
        stacks
    }

    /// Copies what is beside the weights.
    fn copy_others(
        &self,
        form: Form,
        packed: &BTreeMap<&str, PackedLinear<'_>>,
        target: &Path,
    ) -> Result<(), CheckpointError> {
        let entries = fs::read_dir(&self.dir).map_err(|source| failed(&self.dir, source))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default();
            let is_weights = path.extension().is_some_and(|end| end == "safetensors");
            let is_told = name == INDEX_FILE || name == "hf_quant_config.json";
            if is_weights || is_told || !path.is_file() {
                continue;
            }
            whole(&target.join(name), |copy| match name == CONFIG_FILE {
                true => Ok(fs::write(copy, config(form, packed, &fs::read(&path)?))?),
                false => Ok(fs::copy(&path, copy).map(|_| ())?),
            })?;
        }
        Ok(())
    }
}

/// `config.json` with the formats of what is written.
fn config(form: Form, packed: &BTreeMap<&str, PackedLinear<'_>>, text: &[u8]) -> Vec<u8> {
    let Ok(mut config) = serde_json::from_slice::<Map<String, Value>>(text) else {
        return text.to_vec();
    };
    let formats = config.remove("quantization_config");
    config.remove("expert_dtype");
    let is_packed = |linear: &PackedLinear<'_>| linear.2 != WeightFormat::F32;
    let is_packed = form != Form::Dense && packed.values().any(is_packed);
    let blocks = formats
        .as_ref()
        .map(|formats| &formats["weight_block_size"]);
    if is_packed && blocks == Some(&json!([32, 32])) {
        // What V4.1 says there holds of what is written.
        config.extend(formats.map(|formats| ("quantization_config".to_owned(), formats)));
    } else if is_packed {
        let formats = json!({
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        });
        config.insert("quantization_config".to_owned(), formats);
        let mut experts = packed.iter().filter(|(name, _)| name.contains(".experts."));
        if experts.any(|(_, linear)| linear.2 == WeightFormat::Fp4) {
            config.insert("expert_dtype".to_owned(), json!("fp4"));
        }
    }
    Value::Object(config).to_string().into_bytes()
}
