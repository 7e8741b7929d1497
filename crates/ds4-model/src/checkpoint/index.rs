//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Component, Path};

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::error::CheckpointError;
use crate::files;

/// A JSON object in which no key occurs twice; serde_json's own maps keep the last one silently.
pub(super) struct UniqueKeys<V>(pub(super) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueKeys<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = BTreeMap<String, V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, V>()? {
                    if entries.contains_key(&key) {
                        return Err(A::Error::custom(format!("duplicate entry `{key}`")));
                    }
                    entries.insert(key, value);
                }
                Ok(entries)
            }
        }

        deserializer
            .deserialize_map(Entries(PhantomData))
            .map(UniqueKeys)
    }
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: UniqueKeys<String>,
}

/// Tensor name to shard file name, every shard a plain file name.
pub(super) fn read(path: &Path) -> Result<BTreeMap<String, String>, CheckpointError> {
    let text = files::read_text(path).map_err(|source| CheckpointError::Read {
        path: path.to_path_buf(),
        source,
    })?;
    let index_error = |source| CheckpointError::Index {
        path: path.to_path_buf(),
        source,
    };
    let index: Index = serde_json::from_str(&text).map_err(index_error)?;
    let weight_map = index.weight_map.0;
    if weight_map.is_empty() {
        return Err(index_error(Error::custom("`weight_map` lists no tensor")));
    }
    match weight_map.iter().find(|(_, shard)| !is_file_name(shard)) {
        None => Ok(weight_map),
        Some((tensor, shard)) => Err(CheckpointError::ShardName {
            index: path.to_path_buf(),
            tensor: tensor.clone(),
            shard: shard.clone(),
        }),
    }
}

/// Backslashes are refused on every system, so that a checkpoint is as safe on one as on another.
fn is_file_name(shard: &str) -> bool {
    let mut components = Path::new(shard).components();
    let only = (components.next(), components.next());
    matches!(only, (Some(Component::Normal(name)), None) if name == shard)
        && !shard.contains(['\\', ':', '\0'])
}
