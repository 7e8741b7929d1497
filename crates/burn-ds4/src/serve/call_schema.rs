//! What the schema of a tool says of its arguments: which there are, and which of their values are
//! strings, since calls write these as they are and others as JSON.

use llguidance::regex_to_lark;
use serde_json::{Map, Value, json};

use crate::serve::schema::{FORMATS, both, resolve};

/// Ways to compose arguments that a tool may have.
const MAX_WAYS: usize = 64;
/// Schemas that are read for one tool.
const MAX_STEPS: usize = 10_000;
/// Why a tool has no way.
pub const NOTHING: &str = "no arguments follow the schema";
/// Keywords of objects that calls cannot follow: a grammar has no counts, and parameters have an
/// order.
const UNKNOWN: [&str; 14] = [
    "const",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "$dynamicRef",
    "else",
    "enum",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
];

/// One way to compose arguments.
#[derive(Clone, Debug, Default)]
pub struct Way {
    /// Their names and schemas, and whether they have to come.
    pub parameters: Vec<(String, Value, bool)>,
    /// The schema of others, if something is said of them.
    pub others: Option<Value>,
}

/// Reads the schema of a tool.
#[derive(Debug)]
pub struct Reader<'a> {
    root: &'a Value,
    /// Schemas that may still be read. References could multiply them.
    left: usize,
    /// Whether arguments may follow one of several schemas only.
    pub one_of: bool,
}

impl<'a> Reader<'a> {
    pub fn new(root: &'a Value) -> Self {
        Self {
            root,
            left: MAX_STEPS,
            one_of: false,
        }
    }

    fn step(&mut self) -> Result<(), String> {
        let left = self.left.checked_sub(1);
        self.left = left.ok_or("it refers to too much")?;
        Ok(())
    }

    /// The ways that the schema allows, at least one.
    ///
    /// # Errors
    ///
    /// If there is none, or it cannot be told.
    pub fn ways(&mut self, strict: bool) -> Result<Vec<Way>, String> {
        let mut ways = self.ways_of(self.root)?;
        for way in &mut ways {
            for (_, schema, _) in &mut way.parameters {
                if schema.is_null() {
                    *schema = way.others.clone().unwrap_or(Value::Bool(true));
                }
            }
            // Names that the schema does not have, where it says nothing of them, are for tools
            // that have none.
            let free = way.parameters.is_empty() && !strict;
            way.others.get_or_insert(Value::Bool(free));
        }
        match ways.is_empty() {
            true => Err(NOTHING.into()),
            false => Ok(ways),
        }
    }

    fn ways_of(&mut self, schema: &Value) -> Result<Vec<Way>, String> {
        self.step()?;
        let keywords = match schema {
            Value::Bool(true) => return Ok(vec![Way::default()]),
            Value::Bool(false) => return Ok(Vec::new()),
            Value::Object(keywords) => keywords,
            _ => return Err("a schema is no object".into()),
        };
        if let Some(unknown) = UNKNOWN.iter().find(|name| keywords.contains_key(**name)) {
            return Err(format!("`{unknown}` beside properties cannot be followed"));
        }
        if !has_type(keywords, "object") {
            return Ok(Vec::new());
        }
        self.one_of |= keywords.contains_key("oneOf");
        let mut ways = vec![of_properties(keywords)?];
        if let Some(reference) = keywords.get("$ref").and_then(Value::as_str) {
            let target = resolve(self.root, reference)?;
            ways = combined(&ways, &self.ways_of(target)?)?;
        }
        for schema in list(keywords, "allOf")? {
            ways = combined(&ways, &self.ways_of(schema)?)?;
        }
        for name in ["anyOf", "oneOf"] {
            if keywords.contains_key(name) {
                let mut several = Vec::new();
                for schema in list(keywords, name)? {
                    several.extend(self.ways_of(schema)?);
                }
                ways = combined(&ways, &several)?;
            }
        }
        Ok(ways)
    }

    /// The strings that a part of the schema allows.
    ///
    /// # Errors
    ///
    /// If it cannot be read.
    pub fn strings(&mut self, schema: &Value) -> Result<Strings, String> {
        self.step()?;
        let keywords = match schema {
            Value::Bool(false) => return Ok(Strings::None),
            Value::Object(keywords) => keywords,
            _ => return Ok(Strings::All),
        };
        if !has_type(keywords, "string") {
            return Ok(Strings::None);
        }
        let mut strings = Strings::of_keywords(keywords)?;
        if let Some(reference) = keywords.get("$ref").and_then(Value::as_str) {
            let target = resolve(self.root, reference)?;
            strings = strings.and(self.strings(target)?);
        }
        for schema in list(keywords, "allOf")? {
            strings = strings.and(self.strings(schema)?);
        }
        for name in ["anyOf", "oneOf"] {
            if keywords.contains_key(name) {
                let mut several = Strings::None;
                for schema in list(keywords, name)? {
                    several = several.or(self.strings(schema)?);
                }
                strings = strings.and(several);
            }
        }
        Ok(strings)
    }
}

fn of_properties(keywords: &Map<String, Value>) -> Result<Way, String> {
    let mut parameters: Vec<(String, Value, bool)> = match keywords.get("properties") {
        None => Vec::new(),
        Some(Value::Object(properties)) => {
            let properties = properties.iter();
            let parameter =
                |(name, schema): (&String, &Value)| (name.clone(), schema.clone(), false);
            properties.map(parameter).collect()
        }
        Some(_) => return Err("`properties` is no object".into()),
    };
    for name in list(keywords, "required")? {
        let name = name.as_str().ok_or("`required` has what is no name")?;
        match parameters.iter_mut().find(|(known, ..)| known == name) {
            Some((.., required)) => *required = true,
            // It follows the schema of others, which may be said elsewhere.
            None => parameters.push((name.into(), Value::Null, true)),
        }
    }
    let others = keywords.get("additionalProperties").cloned();
    Ok(Way { parameters, others })
}

fn list<'a>(keywords: &'a Map<String, Value>, name: &str) -> Result<&'a [Value], String> {
    match keywords.get(name) {
        None => Ok(&[]),
        Some(Value::Array(values)) => Ok(values),
        Some(_) => Err(format!("`{name}` is no list")),
    }
}

/// Ways that are one of these and one of those.
fn combined(these: &[Way], those: &[Way]) -> Result<Vec<Way>, String> {
    let pairs = these
        .iter()
        .flat_map(|one| those.iter().map(move |other| (one, other)));
    let ways: Vec<Way> = pairs
        .take(MAX_WAYS + 1)
        .map(|(one, other)| one.and(other))
        .collect();
    match ways.len() > MAX_WAYS {
        true => Err(format!(
            "more than {MAX_WAYS} ways to compose the arguments"
        )),
        false => Ok(ways),
    }
}

impl Way {
    fn and(&self, other: &Self) -> Self {
        let mut all = self.clone();
        for (name, schema, required) in &mut all.parameters {
            let found = other.parameters.iter().find(|(known, ..)| known == name);
            let (theirs, theirs_required) = match found {
                Some((_, schema, required)) => (Some(schema), *required),
                None => (None, false),
            };
            // What one side only requires is one of its others.
            let theirs = theirs
                .filter(|schema| !schema.is_null())
                .or(other.others.as_ref());
            *schema = match (std::mem::take(schema), theirs) {
                (schema, None) => schema,
                (Value::Null, Some(theirs)) => match &self.others {
                    Some(ours) => both(ours.clone(), theirs.clone()),
                    None => theirs.clone(),
                },
                (schema, Some(theirs)) => both(schema, theirs.clone()),
            };
            *required |= theirs_required;
        }
        for (name, schema, required) in &other.parameters {
            if self.parameters.iter().all(|(known, ..)| known != name) {
                let schema = match (&self.others, schema) {
                    (None, schema) => schema.clone(),
                    (Some(ours), Value::Null) => match &other.others {
                        Some(theirs) => both(ours.clone(), theirs.clone()),
                        None => ours.clone(),
                    },
                    (Some(ours), schema) => both(schema.clone(), ours.clone()),
                };
                all.parameters.push((name.clone(), schema, *required));
            }
        }
        all.others = match (&self.others, &other.others) {
            (Some(ours), Some(theirs)) => Some(both(ours.clone(), theirs.clone())),
            (ours, theirs) => ours.clone().or_else(|| theirs.clone()),
        };
        all
    }
}

fn has_type(keywords: &Map<String, Value>, name: &str) -> bool {
    match keywords.get("type") {
        None => true,
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == name),
        Some(kind) => kind == name,
    }
}

/// Strings that a schema allows, as an expression for terminals of Lark.
#[derive(Clone, Debug, PartialEq)]
pub enum Strings {
    None,
    All,
    /// Those that match.
    Like(String),
    /// Those that the compiler of JSON knows: they are written as JSON.
    Quoted,
}

impl Strings {
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::None, _) | (_, Self::None) => Self::None,
            (Self::All, strings) | (strings, Self::All) => strings,
            (Self::Quoted, _) | (_, Self::Quoted) => Self::Quoted,
            (Self::Like(one), Self::Like(other)) => Self::Like(format!("({one}) & ({other})")),
        }
    }

    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::None, strings) | (strings, Self::None) => strings,
            (Self::All, _) | (_, Self::All) => Self::All,
            (Self::Quoted, _) | (_, Self::Quoted) => Self::Quoted,
            (Self::Like(one), Self::Like(other)) => Self::Like(format!("{one} | {other}")),
        }
    }

    fn of_keywords(keywords: &Map<String, Value>) -> Result<Self, String> {
        let these = |values: &[Value]| {
            let texts = values.iter().filter(|value| value.is_string());
            // JSON and Lark write them alike.
            let texts = texts.map(|text| Self::Like(text.to_string()));
            texts.fold(Self::None, Self::or)
        };
        let mut strings = Self::All;
        if keywords.contains_key("enum") {
            strings = strings.and(these(list(keywords, "enum")?));
        }
        if let Some(value) = keywords.get("const") {
            strings = strings.and(these(std::slice::from_ref(value)));
        }
        let length = |name: &str| keywords.get(name).and_then(Value::as_u64);
        let lengths = (length("minLength"), length("maxLength"));
        if lengths != (None, None) {
            let least = lengths.0.unwrap_or(0);
            let most = lengths.1.map_or_else(String::new, |most| most.to_string());
            strings = strings.and(Self::Like(format!("/(?s:.{{{least},{most}}})/")));
        }
        if let Some(pattern) = keywords.get("pattern").and_then(Value::as_str) {
            strings = strings.and(searched(pattern).map_or(Self::Quoted, Self::Like));
        }
        let format = keywords.get("format").and_then(Value::as_str);
        if format.is_some_and(|format| FORMATS.contains(&format)) {
            strings = strings.and(Self::Quoted);
        }
        Ok(strings)
    }
}

/// The values of a schema that are no strings.
pub fn without_strings(schema: Value) -> Value {
    let kinds = json!({"type": ["null", "boolean", "number", "array", "object"]});
    both(schema, kinds)
}

/// A regular expression for all of a text that has a match of this one, unless it asks for ends
/// elsewhere than around one of its alternatives.
fn searched(pattern: &str) -> Option<String> {
    let (mut ways, mut way) = (Vec::new(), (0, 0));
    let (mut depth, mut in_class, mut escaped) = (0, false, false);
    let mut ends = [false; 2];
    for (at, char) in pattern.char_indices() {
        if std::mem::take(&mut escaped) {
            continue;
        }
        match char {
            '\\' => escaped = true,
            ']' => in_class = false,
            _ if in_class => (),
            '[' => in_class = true,
            '(' => depth += 1,
            ')' => depth -= 1,
            '|' if depth == 0 => {
                ways.push((way, at, ends));
                (way, ends) = ((at + 1, at + 1), [false; 2]);
            }
            '^' if at == way.0 => (ends[0], way.1) = (true, at + 1),
            '$' if depth == 0 && matches!(pattern.as_bytes().get(at + 1), None | Some(b'|')) => {
                ends[1] = true;
            }
            '^' | '$' => return None,
            _ => (),
        }
    }
    ways.push((way, pattern.len(), ends));
    let any = |is_end: bool| if is_end { "" } else { "(?s:.*)" };
    let ways = ways.into_iter().map(|((_, start), end, [first, last])| {
        let inner = &pattern[start..end - usize::from(last)];
        let inner = regex_to_lark(inner, "dw");
        format!("{}(?:{inner}){}", any(first), any(last))
    });
    Some(format!("/{}/", ways.collect::<Vec<_>>().join("|")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_is_of_all_of_a_text_with_ends_where_it_asks_for_them() {
        for (pattern, whole) in [
            ("^[a-z]+$", "/(?:[a-z]+)/"),
            ("a/b", r"/(?s:.*)(?:a\/b)(?s:.*)/"),
            (r"^https?:\/\/x", r"/(?:https?:\/\/x)(?s:.*)/"),
            (r"^a\$", r"/(?:a\$)(?s:.*)/"),
            (r"a[$^]$", "/(?s:.*)(?:a[$^])/"),
            (
                "^a|b$|(c|d)",
                "/(?:a)(?s:.*)|(?s:.*)(?:b)|(?s:.*)(?:(c|d))(?s:.*)/",
            ),
            (r"^\d+$", "/(?:[0-9]+)/"),
        ] {
            assert_eq!(searched(pattern).as_deref(), Some(whole), "{pattern}");
        }
        for pattern in ["(^a)", "a$b", "(a$|b)"] {
            assert_eq!(searched(pattern), None, "{pattern}");
        }
    }

    fn of(parameters: Value) -> Result<Vec<Way>, String> {
        Reader::new(&parameters).ways(false)
    }

    #[test]
    fn a_way_has_what_each_of_its_schemas_says() {
        let schema = json!({
            "type": "object",
            "properties": {"a": {"minimum": 1}},
            "required": ["a", "z"],
            "additionalProperties": {"type": "integer"},
            "anyOf": [
                {"properties": {"a": {"maximum": 9}, "b": {"const": 1}}, "required": ["b"]},
                {"$ref": "#/$defs/c"},
                {"type": "string"},
            ],
            "$defs": {"c": {"properties": {"a": true, "z": true}, "additionalProperties": false}},
        });
        let found = of(schema).expect("ways");
        let integer = json!({"type": "integer"});
        let both = json!({"allOf": [{"minimum": 1}, {"maximum": 9}]});
        let b = json!({"allOf": [{"const": 1}, integer]});
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0].parameters,
            [
                ("a".into(), both, true),
                ("z".into(), integer.clone(), true),
                ("b".into(), b, true),
            ]
        );
        assert_eq!(found[0].others, Some(integer.clone()));
        let a = json!({"minimum": 1});
        let expected = [("a".into(), a, true), ("z".into(), integer, true)];
        assert_eq!(found[1].parameters, expected);
        for (schema, word) in [
            (json!({"minProperties": 1}), "minProperties"),
            (json!({"anyOf": [{"type": "null"}]}), "no arguments"),
            (json!({"$ref": "https://x.org/s"}), "not of this schema"),
            (json!({"required": "a"}), "no list"),
        ] {
            let error = of(schema.clone()).expect_err("it is refused");
            assert!(error.contains(word), "{schema}: {error}");
        }
    }
}
