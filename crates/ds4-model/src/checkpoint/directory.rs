//! The files of a checkpoint, and where its tensors are in them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use safetensors::Dtype;

use super::error::CheckpointError;
use super::format::{FP8_BLOCK, WeightFormat};
use super::names::{DRAFTER, Dialect, Stack, skipped};
use super::shard::{self, Shard};
use super::{index, names};
use crate::config::ModelConfig;

pub(crate) const CONFIG_FILE: &str = "config.json";
const SINGLE_FILE: &str = "model.safetensors";
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Fewest bytes of a weight that is one of many in a tensor: what lists them takes memory, too.
const LEAST_BYTES: usize = 64;

/// Where a tensor is stored.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Range in the shard's data, checked against its length when the shard was opened.
    begin: usize,
    end: usize,
}

/// A tensor of a checkpoint, as it is stored.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointTensor<'a> {
    /// Name, as released checkpoints have it, whatever it is in the file.
    pub name: &'a str,
    /// Stored element type.
    pub dtype: Dtype,
    /// Stored shape; that of FP4 weights counts bytes.
    pub shape: &'a [usize],
    /// Little-endian elements in row-major order, without any alignment.
    pub bytes: &'a [u8],
    /// The file that holds it.
    pub shard: &'a Path,
}

/// An opened checkpoint directory. Its files are memory-mapped and must not be changed while this
/// value lives.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) dir: PathBuf,
    pub(super) config: ModelConfig,
    pub(super) dialect: Dialect,
    pub(super) shards: Vec<Arc<Shard>>,
    pub(super) entries: BTreeMap<String, Entry>,
    /// In what a device holds packed stacks, once somebody has asked.
    pub(super) stacks: OnceLock<BTreeMap<(String, WeightFormat), WeightFormat>>,
}

/// Whether no block of so many rows of scales reaches from one part of an expert into the next.
pub(super) fn is_apart(parts: usize, rows: usize, inter: usize) -> bool {
    parts == 1 || inter.is_multiple_of(FP8_BLOCK) || rows == parts * inter
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`: reads `config.json` and the headers of the weight files.
    ///
    /// `model.safetensors` is used where it exists, else the shards that
    /// `model.safetensors.index.json` lists. Of a tensor in several shards, the index says which
    /// copy counts. Tensors that are in a shard but not in the index are kept. Tensors have their
    /// released names from then on. Where there is none of a drafter, nothing drafts, whatever the
    /// configuration says.
    ///
    /// # Errors
    /// See [`CheckpointError`]; every message names the file.
    ///
    /// # Example
    ///
    /// Look at a tensor without reading it.
    ///
    /// ```
    /// use ds4_model::checkpoint::{Checkpoint, Dtype};
    ///
    /// let checkpoint = Checkpoint::open("../../assets/ds4-tiny".as_ref())?;
    /// let embedding = checkpoint.tensor("embed.weight").expect("every checkpoint has one");
    /// let config = checkpoint.config();
    /// assert_eq!(embedding.shape, [config.vocab_size, config.hidden_size]);
    /// assert_eq!(embedding.dtype, Dtype::BF16);
    /// # Ok::<(), ds4_model::checkpoint::CheckpointError>(())
    /// ```
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        if let Some(path) = shard::gguf_at(dir, &[SINGLE_FILE, INDEX_FILE]) {
            return Err(CheckpointError::Gguf { path });
        }
        let (config, has_stages) = ModelConfig::from_checkpoint(&dir.join(CONFIG_FILE))?;
        let single = dir.join(SINGLE_FILE);
        let index = dir.join(INDEX_FILE);
        let mut checkpoint = Self {
            dir: dir.to_path_buf(),
            config,
            dialect: Dialect::default(),
            shards: Vec::new(),
            entries: BTreeMap::new(),
            stacks: OnceLock::new(),
        };
        if single.exists() {
            checkpoint.add_shard(&single, &BTreeMap::new())?;
        } else if index.exists() {
            checkpoint.add_indexed(&index)?;
        } else {
            return Err(CheckpointError::NoWeights {
                dir: dir.to_path_buf(),
            });
        }
        checkpoint.rename();
        checkpoint.split_stacks();
        checkpoint.settle_drafter(has_stages);
        checkpoint.check_dspark()?;
        Ok(checkpoint)
    }

    fn add_indexed(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let weight_map = index::read(path)?;
        let shards: BTreeMap<&str, PathBuf> = weight_map
            .values()
            .map(|shard| (shard.as_str(), self.dir.join(shard)))
            .collect();
        let absent: Vec<String> = shards
            .iter()
            .filter(|(_, path)| !path.exists())
            .map(|(shard, _)| shard.to_string())
            .collect();
        if !absent.is_empty() {
            return Err(CheckpointError::MissingShards {
                index: path.to_path_buf(),
                shards: absent,
            });
        }
        for shard in shards.values() {
            self.add_shard(shard, &weight_map)?;
        }
        let absent: Vec<String> = weight_map
            .iter()
            .filter(|(name, shard)| match self.entries.get(*name) {
                Some(entry) => self.shards[entry.shard].path() != shards[shard.as_str()],
                None => true,
            })
            .map(|(name, shard)| format!("{name} ({shard})"))
            .collect();
        if !absent.is_empty() {
            return Err(CheckpointError::NotInShard {
                index: path.to_path_buf(),
                tensors: absent,
            });
        }
        Ok(())
    }

    /// Adds the tensors of a shard, but for those that the index has in another one: that may have
    /// newer copies of them.
    pub(super) fn add_shard(
        &mut self,
        path: &Path,
        weight_map: &BTreeMap<String, String>,
    ) -> Result<(), CheckpointError> {
        let (shard, tensors) = Shard::open(path)?;
        let number = self.shards.len();
        for (name, info) in tensors {
            let owner = weight_map.get(&name);
            if owner.is_some_and(|owner| self.dir.join(owner) != path) {
                continue;
            }
            let (begin, end) = info.data_offsets;
            let entry = Entry {
                shard: number,
                dtype: info.dtype,
                shape: info.shape,
                begin,
                end,
            };
            if let Some(first) = self.entries.get(&name) {
                return Err(CheckpointError::DuplicateTensor {
                    first: self.shards[first.shard].path().to_path_buf(),
                    second: path.to_path_buf(),
                    name,
                });
            }
            self.entries.insert(name, entry);
        }
        self.shards.push(Arc::new(shard));
        Ok(())
    }

    /// Gives tensors their released names, where there is no such tensor.
    fn rename(&mut self) {
        let renamed = self.entries.keys();
        let renamed = renamed.filter_map(|name| Some((name.clone(), names::released(name)?)));
        for (other, (new, dialect)) in renamed.collect::<Vec<_>>() {
            if !self.entries.contains_key(&new)
                && let Some(entry) = self.entries.remove(&other)
            {
                self.entries.insert(new, entry);
                self.dialect = self.dialect.max(dialect);
            }
        }
    }

    /// Makes a tensor of each part of an expert, where all experts of a layer are in one.
    fn split_stacks(&mut self) {
        let stacks = self.entries.keys().filter_map(|name| {
            let stack = names::STACKS
                .iter()
                .find(|stack| name.ends_with(stack.end))?;
            Some((name.clone(), stack))
        });
        for (name, stack) in stacks.collect::<Vec<_>>() {
            let parts = self.parts_of(&name, stack);
            if !parts.is_empty()
                && parts
                    .iter()
                    .all(|(part, _)| !self.entries.contains_key(part))
            {
                self.entries.remove(&name);
                self.entries.extend(parts);
            }
        }
    }

    /// None where the tensor is not that of all experts, or blocks of scales reach from one part
    /// into the next, or have no weights.
    fn parts_of(&self, name: &str, stack: &Stack) -> Vec<(String, Entry)> {
        let experts = self.config.n_routed_experts;
        let parts = stack.parts.len();
        let entry = &self.entries[name];
        let &[matrices, rows, columns] = &entry.shape[..] else {
            return Vec::new();
        };
        let length = entry.end - entry.begin;
        let divides = rows.is_multiple_of(parts) && length.is_multiple_of(experts * parts);
        let length = length / (experts * parts);
        let prefix = &name[..name.len() - stack.end.len()];
        let is_usable = match stack.of {
            "weight" => length >= LEAST_BYTES,
            _ => {
                let part = stack.parts[0];
                let weight = format!("{prefix}.ffn.experts.0.{part}.weight");
                let inter = self.config.moe_intermediate_size;
                is_apart(parts, rows, inter) && self.entries.contains_key(&weight)
            }
        };
        if matrices != experts || !divides || !is_usable {
            return Vec::new();
        }
        let pairs = (0..experts).flat_map(|expert| stack.parts.iter().map(move |of| (expert, of)));
        let part = |(index, (expert, part)): (usize, (usize, &&str))| {
            let begin = entry.begin + index * length;
            let name = format!("{prefix}.ffn.experts.{expert}.{part}.{}", stack.of);
            let part = Entry {
                shape: vec![rows / parts, columns],
                begin,
                end: begin + length,
                ..entry.clone()
            };
            (name, part)
        };
        pairs.enumerate().map(part).collect()
    }

    /// Takes the layers of the DSpark drafter from the tensors, where the configuration does not
    /// tell them. Without a tensor of any drafter, there is none.
    fn settle_drafter(&mut self, has_stages: bool) {
        let stages = self.numbers_under("mtp").len();
        if let Some(drafter) = self.config.dspark.as_mut().filter(|_| !has_stages) {
            drafter.layers = stages;
        }
        let named = match (&self.config.dspark, self.config.num_mtp_layers) {
            (None, 0) => return,
            (Some(_), _) => "a DSpark drafter",
            (None, _) => "an MTP layer",
        };
        let mut drafting = self.entries.keys();
        let is_drafting = |name: &String| name.starts_with(DRAFTER) && skipped(name).is_none();
        if !drafting.any(is_drafting) {
            self.config.dspark = None;
            self.config.num_mtp_layers = 0;
            let dir = self.dir.display();
            log::warn!("{dir}: {CONFIG_FILE} names {named}, of which there is no tensor");
        }
    }

    pub(super) fn check_dspark(&self) -> Result<(), CheckpointError> {
        if self.config.dspark.is_some() {
            return Ok(());
        }
        let tensors: Vec<String> = self
            .entries
            .keys()
            .filter(|name| names::is_dspark(name))
            .cloned()
            .collect();
        if tensors.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::UnknownDspark {
            dir: self.dir.clone(),
            tensors,
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The configuration in `config.json`, without a drafter that there is no tensor of.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Whose names the tensors have in the files.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = CheckpointTensor<'_>> {
        self.entries
            .iter()
            .map(|(name, entry)| self.view(name, entry))
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<CheckpointTensor<'_>> {
        let (name, entry) = self.entries.get_key_value(name)?;
        Some(self.view(name, entry))
    }

    /// Why a tensor is of no use to a model, if it is: it is a copy of another one, it is for
    /// images, it is a bias where token ids choose the experts, or it has no elements.
    pub fn skipped(&self, name: &str) -> Option<&'static str> {
        let gate = name.strip_suffix(names::BIAS);
        let is_unused = gate.is_some_and(|gate| {
            let table = format!("{gate}{}", names::TABLE);
            self.entries.contains_key(&table)
        });
        let entry = self.entries.get(name);
        let is_empty = entry.is_some_and(|entry| entry.begin == entry.end);
        let other = [(is_unused, "biases"), (is_empty, "empty")];
        let other = other.into_iter().find(|(applies, _)| *applies);
        skipped(name).or(other.map(|(_, why)| why))
    }

    /// Gives the pages of a tensor that was read back to the system, which keeps them for as long
    /// as it has memory for that. They are read again where anybody asks for them.
    pub(super) fn release(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            self.shards[entry.shard].release(entry.begin..entry.end);
        }
    }

    /// Reads bytes of a tensor from `first` on.
    pub(super) fn read(&self, name: &str, first: usize, bytes: &mut [u8]) -> io::Result<()> {
        let entry = &self.entries[name];
        self.shards[entry.shard].read(entry.begin + first, bytes)
    }

    /// The file that has a tensor, and where that is in its data.
    pub(super) fn mapped(&self, name: &str) -> (Arc<Shard>, Range<usize>) {
        let entry = &self.entries[name];
        (self.shards[entry.shard].clone(), entry.begin..entry.end)
    }

    /// The numbers of the tensors `{prefix}.{number}.*`.
    pub(super) fn numbers_under(&self, prefix: &str) -> BTreeSet<usize> {
        let prefix = format!("{prefix}.");
        let names = self.entries.range(prefix.clone()..).map(|(name, _)| name);
        let names = names.map_while(|name| name.strip_prefix(&prefix));
        let numbers = names.filter_map(|name| name.split_once('.'));
        numbers
            .filter_map(|(number, _)| number.parse().ok())
            .collect()
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a Entry) -> CheckpointTensor<'a> {
        let shard = &self.shards[entry.shard];
        CheckpointTensor {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &shard.data()[entry.begin..entry.end],
            shard: shard.path(),
        }
    }
}
