//! Reading a JSON object while collecting everything that is wrong with it.

use std::collections::BTreeSet;
use std::fmt::Debug;

use serde_json::{Map, Value};

use crate::config::error::{ConfigError, ConfigErrorKind};
use crate::config::shape::ModelConfig;

/// How a value is read, and what to call it where it cannot be.
pub(super) struct ValueKind<T> {
    read: fn(&Value) -> Option<T>,
    expected: &'static str,
}

// Not derived: a derive would ask for `T: Copy`.
impl<T> Clone for ValueKind<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for ValueKind<T> {}

pub(super) const SIZE: ValueKind<usize> = ValueKind {
    read: size,
    expected: "a non-negative integer",
};
pub(super) const SIZES: ValueKind<Vec<usize>> = ValueKind {
    read: |value| value.as_array()?.iter().map(size).collect(),
    expected: "a list of non-negative integers",
};
pub(super) const REAL: ValueKind<f64> = ValueKind {
    read: Value::as_f64,
    expected: "a number",
};
pub(super) const TEXT: ValueKind<String> = ValueKind {
    read: |value| value.as_str().map(str::to_string),
    expected: "a string",
};
pub(super) const TEXTS: ValueKind<Vec<String>> = ValueKind {
    read: |value| {
        let entries = value.as_array()?.iter();
        entries
            .map(|entry| entry.as_str().map(str::to_string))
            .collect()
    },
    expected: "a list of strings",
};
pub(super) const BOOL: ValueKind<bool> = ValueKind {
    read: Value::as_bool,
    expected: "true or false",
};
/// A token id; `transformers` writes some of them as a list.
pub(super) const ID: ValueKind<u32> = ValueKind {
    read: |value| {
        let id = match value.as_array() {
            Some(list) if list.len() == 1 => &list[0],
            _ => value,
        };
        u32::try_from(id.as_u64()?).ok()
    },
    expected: "one token id",
};

/// The first of the token ids; the others are [`IDS`].
pub(super) const FIRST_ID: ValueKind<u32> = ValueKind {
    read: |value| (IDS.read)(value)?.first().copied(),
    expected: IDS.expected,
};

/// A number of tokens, of which -1 means all, and so 0 here.
pub(super) const TOP_K: ValueKind<usize> = ValueKind {
    read: |value| match value.as_i64() {
        Some(-1) => Some(0),
        _ => size(value),
    },
    expected: "-1 or a non-negative integer",
};

/// A token id, or several.
pub(super) const IDS: ValueKind<Vec<u32>> = ValueKind {
    read: |value| {
        let list = value
            .as_array()
            .map_or(std::slice::from_ref(value), Vec::as_slice);
        let id = |id: &Value| u32::try_from(id.as_u64()?).ok();
        let ids: Vec<u32> = list.iter().map(id).collect::<Option<_>>()?;
        (!ids.is_empty()).then_some(ids)
    },
    expected: "a token id or a list of them",
};

fn size(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

pub(super) struct Keys<'a> {
    root: &'a Map<String, Value>,
    missing: BTreeSet<String>,
    contradictory: BTreeSet<String>,
    /// Fields of the configuration for which the file gave no usable value.
    bad: BTreeSet<&'static str>,
}

impl<'a> Keys<'a> {
    pub(super) fn new(root: &'a Map<String, Value>) -> Self {
        Self {
            root,
            missing: BTreeSet::new(),
            contradictory: BTreeSet::new(),
            bad: BTreeSet::new(),
        }
    }

    fn find(&self, path: &str) -> Option<&'a Value> {
        let mut parts = path.split('.');
        let mut value = self.root.get(parts.next()?)?;
        for part in parts {
            value = value.as_object()?.get(part)?;
        }
        Some(value)
    }

    /// Whether the key is there, be it with `null`.
    pub(super) fn has(&self, path: &str) -> bool {
        self.find(path).is_some()
    }

    /// The value under a dotted path; `null` counts as absent.
    pub(super) fn lookup(&self, path: &str) -> Option<&'a Value> {
        self.find(path).filter(|value| !value.is_null())
    }

    /// A value that is read and judged elsewhere.
    pub(super) fn peek<T>(&self, path: &str, kind: ValueKind<T>) -> Option<T> {
        self.lookup(path).and_then(kind.read)
    }

    /// The keys that begin like this, but for those with `null`.
    pub(super) fn names_with(&self, prefix: &str) -> Vec<String> {
        let named = self.root.iter().filter(|(_, value)| !value.is_null());
        let names = named.map(|(name, _)| name.clone());
        names.filter(|name| name.starts_with(prefix)).collect()
    }

    /// Whether the file says anything under one of the paths.
    pub(super) fn mentions(&self, paths: &[&str]) -> bool {
        paths.iter().any(|path| self.lookup(path).is_some())
    }

    pub(super) fn is_bad(&self, field: &str) -> bool {
        self.bad.contains(field)
    }

    /// One of the paths must be there; what it says is read elsewhere.
    pub(super) fn need(&mut self, field: &'static str, paths: &[&str]) {
        if !self.mentions(paths) {
            self.bad.insert(field);
            self.missing.insert(paths.join(" or "));
        }
    }

    pub(super) fn contradiction(&mut self, field: &'static str, message: String) {
        self.bad.insert(field);
        self.contradictory.insert(message);
    }

    /// The value that all of the paths that are there agree on, `None` where there is none.
    pub(super) fn optional<T: PartialEq + Debug>(
        &mut self,
        field: &'static str,
        paths: &[&str],
        kind: ValueKind<T>,
    ) -> Option<T> {
        let mut found: Option<(&str, T)> = None;
        for &path in paths {
            let Some(value) = self.lookup(path) else {
                continue;
            };
            let Some(read) = (kind.read)(value) else {
                let expected = kind.expected;
                self.contradiction(
                    field,
                    format!("{path} is {}, expected {expected}", shorten(value)),
                );
                continue;
            };
            match &found {
                Some((first, other)) if *other != read => {
                    let message = format!("{first} is {other:?} but {path} is {read:?}");
                    self.contradiction(field, message);
                }
                Some(_) => {}
                None => found = Some((path, read)),
            }
        }
        found.map(|(_, value)| value)
    }

    /// As [`optional`](Self::optional), and one of the paths must be there.
    pub(super) fn required<T: PartialEq + Debug>(
        &mut self,
        field: &'static str,
        paths: &[&str],
        kind: ValueKind<T>,
    ) -> Option<T> {
        self.need(field, paths);
        self.optional(field, paths, kind)
    }

    pub(super) fn set<T: PartialEq + Debug>(
        &mut self,
        target: &mut T,
        field: &'static str,
        paths: &[&str],
        kind: ValueKind<T>,
    ) {
        if let Some(value) = self.required(field, paths, kind) {
            *target = value;
        }
    }

    /// As [`set`](Self::set), but that `target` stays what it is where no path is there.
    pub(super) fn set_if_there<T: PartialEq + Debug>(
        &mut self,
        target: &mut T,
        field: &'static str,
        paths: &[&str],
        kind: ValueKind<T>,
    ) {
        if paths.iter().any(|path| self.has(path)) {
            self.set(target, field, paths, kind);
        }
    }

    /// A key with one supported value, which it also has where it is absent.
    pub(super) fn expect<T: PartialEq + Debug>(
        &mut self,
        path: &'static str,
        kind: ValueKind<T>,
        supported: T,
    ) {
        if let Some(value) = self.optional(path, &[path], kind)
            && value != supported
        {
            self.contradiction(
                path,
                format!("{path} is {value:?}, only {supported:?} is supported"),
            );
        }
    }

    /// The configuration, if nothing was wrong with the keys and nothing is wrong with the values.
    pub(super) fn finish(mut self, config: ModelConfig) -> Result<ModelConfig, ConfigError> {
        for problem in config.problems() {
            if !problem.fields.iter().any(|field| self.bad.contains(field)) {
                self.contradictory.insert(problem.message);
            }
        }
        self.judge(config)
    }

    /// The result, if nothing was wrong with the keys.
    pub(super) fn judge<T>(self, result: T) -> Result<T, ConfigError> {
        if self.missing.is_empty() && self.contradictory.is_empty() {
            return Ok(result);
        }
        Err(ConfigErrorKind::Invalid {
            missing: self.missing.into_iter().collect(),
            contradictory: self.contradictory.into_iter().collect(),
        }
        .into())
    }
}

/// A value for an error message: whole lists do not help there.
fn shorten(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= LONGEST {
        return text;
    }
    let head: String = text.chars().take(LONGEST).collect();
    format!("{head}…")
}
