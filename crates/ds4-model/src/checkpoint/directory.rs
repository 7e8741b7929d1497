//! The files of a checkpoint, and where its tensors are in them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::error::CheckpointError;
use super::shard::{self, Shard};
use super::{index, names};
use crate::config::{DsparkParams, ModelConfig};

pub(crate) const CONFIG_FILE: &str = "config.json";
const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Where a tensor is stored.
#[derive(Debug)]
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
    /// Name in the file.
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
    pub(super) shards: Vec<Shard>,
    pub(super) entries: BTreeMap<String, Entry>,
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`: reads `config.json` and the headers of the weight files.
    ///
    /// `model.safetensors` is used where it exists, else the shards that
    /// `model.safetensors.index.json` lists. Of a tensor in several shards, the index says which
    /// copy counts. Tensors that are in a shard but not in the index are kept.
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
            shards: Vec::new(),
            entries: BTreeMap::new(),
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
        checkpoint.rename_older();
        if !has_stages {
            checkpoint.count_stages();
        }
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
        self.shards.push(shard);
        Ok(())
    }

    /// Gives tensors of older conversions their released names, where there is no such tensor.
    fn rename_older(&mut self) {
        let renamed = self.entries.keys();
        let renamed = renamed.filter_map(|name| Some((name.clone(), names::released(name)?)));
        for (old, new) in renamed.collect::<Vec<_>>() {
            if !self.entries.contains_key(&new)
                && let Some(entry) = self.entries.remove(&old)
            {
                self.entries.insert(new, entry);
            }
        }
    }

    /// Takes the layers of the DSpark drafter from the tensors. Without any, there is no drafter.
    fn count_stages(&mut self) {
        let stages = self.numbers_under("mtp").len();
        let drafter = self.config.dspark.take();
        self.config.dspark = drafter.filter(|_| stages > 0).map(|drafter| DsparkParams {
            layers: stages,
            ..drafter
        });
        if stages == 0 {
            let dir = self.dir.display();
            log::warn!("{dir}: {CONFIG_FILE} names a DSpark drafter, of which there is no tensor");
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

    /// The configuration in `config.json`.
    pub fn config(&self) -> &ModelConfig {
        &self.config
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

    /// Gives the pages of a tensor that was read back to the system, which keeps them for as long
    /// as it has memory for that. They are read again where anybody asks for them.
    pub(super) fn release(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            self.shards[entry.shard].release(entry.begin..entry.end);
        }
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
