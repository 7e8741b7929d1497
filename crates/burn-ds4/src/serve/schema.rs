//! JSON schemas: what they only hint at, and what they refer to.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

/// Keywords that are remarks for readers, or names of definitions, which copies have elsewhere.
const REMARKS: [&str; 13] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "definitions",
    "$def",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];
/// Keywords of numbers.
const NUMBERS: [&str; 5] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
/// The largest multiple, without its point: remainders times ten are of 32 bits in `llguidance`.
const MULTIPLE: f64 = 400_000_000.0;
/// Formats of strings that are followed. Others are a hint.
pub const FORMATS: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Does something with a schema and all schemas in it.
fn each(schema: &mut Value, work: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| each(schema, work)),
        Value::Object(keywords) => {
            work(keywords);
            for (name, value) in keywords {
                match (name.as_str(), value) {
                    // Of names, which may be those of keywords.
                    (
                        "properties" | "patternProperties" | "$defs" | "definitions" | "$def",
                        Value::Object(schemas),
                    ) => schemas.values_mut().for_each(|schema| each(schema, work)),
                    // Values, not schemas.
                    ("const" | "enum" | "default" | "examples", _) => (),
                    (_, value) => each(value, work),
                }
            }
        }
        _ => (),
    }
}

/// Leaves out what a schema says and does not ask for: formats that nobody knows, which are a hint
/// then by JSON Schema, and items that need not be unique.
fn leave_out_hints(schema: &mut Value) {
    each(schema, &mut |keywords| {
        keywords.retain(|name, value| match name.as_str() {
            "format" => value.as_str().is_none_or(|name| FORMATS.contains(&name)),
            "uniqueItems" => *value != Value::Bool(false),
            _ => true,
        });
    });
}

/// The part of a schema that a reference names.
///
/// # Errors
///
/// If it is of another document, or nothing is there.
pub fn resolve<'a>(root: &'a Value, reference: &str) -> Result<&'a Value, String> {
    let own = root.get("$id").and_then(Value::as_str).unwrap_or_default();
    let pointer = reference.strip_prefix(own).unwrap_or(reference);
    let pointer = pointer.strip_prefix('#').and_then(decoded);
    let found = pointer.and_then(|pointer| root.pointer(&pointer));
    found.ok_or_else(|| format!("`$ref` {reference:?} is not of this schema"))
}

/// The text of a fragment of an address.
fn decoded(fragment: &str) -> Option<String> {
    let mut parts = fragment.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

/// A part of a schema as a schema of its own, with what it refers to, once each, and without hints
/// and remarks: parts that say the same are the same then.
///
/// # Errors
///
/// If a reference leads nowhere, or back to itself before anything is said.
pub fn bundled(root: &Value, part: &Value) -> Result<Value, String> {
    let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
    let mut error = None;
    let mut rewritten = |part: &Value, found: &mut Vec<String>| {
        let mut part = part.clone();
        leave_out_hints(&mut part);
        each(&mut part, &mut |keywords| {
            keywords.retain(|name, _| !REMARKS.contains(&name.as_str()));
            let Some(Value::String(reference)) = keywords.get_mut("$ref") else {
                return;
            };
            let next = numbers.len();
            let number = *numbers.entry(reference.clone()).or_insert(next);
            if number == next {
                found.push(reference.clone());
            }
            *reference = format!("#/$defs/{number}");
        });
        part
    };
    let (mut found, mut definitions) = (Vec::new(), Map::new());
    let mut sound = HashSet::new();
    let mut whole = rewritten(part, &mut found);
    while let Some(reference) = found.get(definitions.len()).cloned() {
        let target = resolve(root, &reference).unwrap_or_else(|unknown| {
            error.get_or_insert(unknown);
            &Value::Null
        });
        if let Err(circle) = leads_on(root, target, &mut sound, &mut vec![reference.clone()]) {
            error.get_or_insert(circle);
        }
        let definition = rewritten(target, &mut found);
        definitions.insert(definitions.len().to_string(), definition);
    }
    if let Value::Object(keywords) = &mut whole {
        if !definitions.is_empty() {
            keywords.insert("$defs".into(), definitions.into());
        }
        // It says how keywords are meant.
        if let Some(dialect) = root.get("$schema") {
            keywords.insert("$schema".into(), dialect.clone());
        }
    }
    error.map_or(Ok(whole), Err)
}

/// Refuses a schema that refers to one of those that led to it before it says anything of parts of
/// a value.
fn leads_on(
    root: &Value,
    schema: &Value,
    sound: &mut HashSet<String>,
    from: &mut Vec<String>,
) -> Result<(), String> {
    let reference = schema.get("$ref").and_then(Value::as_str);
    if let Some(reference) = reference.filter(|reference| !sound.contains(*reference)) {
        if from.iter().any(|before| before == reference) {
            return Err(format!("`$ref` {reference:?} leads back to itself"));
        }
        from.push(reference.into());
        if let Ok(target) = resolve(root, reference) {
            leads_on(root, target, sound, from)?;
        }
        sound.extend(from.pop());
    }
    for name in ["allOf", "anyOf", "oneOf"] {
        let schemas = schema.get(name).and_then(Value::as_array);
        for schema in schemas.into_iter().flatten() {
            leads_on(root, schema, sound, from)?;
        }
    }
    Ok(())
}

/// The numbers in a schema that are multiples of something. Whether there are any between their
/// bounds is not known before one begins.
pub fn multiples(schema: &Value) -> Vec<Value> {
    let (mut schema, mut found) = (schema.clone(), Vec::new());
    each(&mut schema, &mut |keywords| {
        if keywords.contains_key("multipleOf") {
            let mut numbers = keywords.clone();
            numbers.retain(|name, _| NUMBERS.contains(&name.as_str()));
            let is_whole = keywords.get("type").is_some_and(|kind| kind == "integer");
            numbers.insert(
                "type".into(),
                json!(["number", "integer"][usize::from(is_whole)]),
            );
            found.push(numbers.into());
        }
    });
    found
}

/// The schema of a whole document, without hints.
///
/// # Errors
///
/// If a reference leads back to itself before anything is said, or a multiple is too large.
pub fn document(root: &Value) -> Result<Value, String> {
    let (mut schema, mut sound, mut result) = (root.clone(), HashSet::new(), Ok(()));
    each(&mut schema, &mut |keywords| {
        let digits = keywords.get("multipleOf").map(Value::to_string);
        let digits = digits.map(|number| number.replace('.', ""));
        let digits = digits.filter(|digits| digits.parse().is_ok_and(|of: f64| of > MULTIPLE));
        if let (Some(digits), true) = (digits, result.is_ok()) {
            result = Err(format!(
                "`multipleOf` has the digits {digits}, at most {MULTIPLE}"
            ));
        }
        let reference = keywords.get("$ref").cloned();
        if result.is_ok() && reference.is_some() {
            let schema = json!({"$ref": reference});
            result = leads_on(root, &schema, &mut sound, &mut Vec::new());
        }
    });
    leave_out_hints(&mut schema);
    result.map(|()| schema)
}

/// What follows both.
pub fn both(one: Value, other: Value) -> Value {
    match (one, other) {
        (Value::Bool(true), schema) | (schema, Value::Bool(true)) => schema,
        (one, other) if one == other => one,
        (one, other) => json!({"allOf": [one, other]}),
    }
}
