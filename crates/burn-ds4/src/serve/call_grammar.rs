//! Tool calls as a grammar of `llguidance`: the markup that prompts ask for, with arguments that
//! follow the schemas of the tools.

use std::fmt::Write;

use deepseek_recipe_core::tools::ToolDefinition;
use serde_json::{Map, Value, json};

use crate::serve::grammar::{CallRules, Wanted, schema_of};
use crate::serve::response_format::MAX_SCHEMA;

/// Most bytes of the schemas of all tools.
const MAX_SCHEMAS: usize = 4 * MAX_SCHEMA;
/// Keywords under which a schema keeps what others refer to.
const DEFINITIONS: [&str; 3] = ["$defs", "definitions", "$def"];

/// The grammar, in the notation of Lark. `mark` is the token that marks tags.
pub fn lark(wanted: &Wanted, mark: u32) -> Result<String, String> {
    let (rules, start) = match wanted {
        Wanted::Calls(rules) => (rules, "calls".to_owned()),
        // Tags begin with "<", as other text may.
        Wanted::CallsOr(rules, None) => (rules, r#"(TEXT | "<")* ("<" MARK block)?"#.to_owned()),
        Wanted::CallsOr(rules, Some(other)) => (
            rules,
            format!(
                "{} | /\\n{{0,2}}/ \"<\" MARK block",
                match &**other {
                    Wanted::Json(schema) => embedded(schema.clone()),
                    Wanted::Regex(regex) => format!("/{}/", with_slashes_escaped(regex)),
                    Wanted::Calls(_) | Wanted::CallsOr(..) => return Err("calls or calls".into()),
                }
            ),
        ),
        Wanted::Json(_) | Wanted::Regex(_) => return Err("no calls".into()),
    };
    let bytes: usize = rules
        .tools
        .iter()
        .map(|tool| tool.parameters.to_string().len())
        .sum();
    if bytes > MAX_SCHEMAS {
        return Err(format!(
            "the schemas have {bytes} bytes, at most {MAX_SCHEMAS}"
        ));
    }
    let mut grammar = Grammar::default();
    grammar.rules(rules);
    let block = r#"block: "tool_calls>\n" calls"#;
    let mark = format!("mark: <[{mark}]>");
    let text = "TEXT: /[^<]+/";
    let chunk = r"CHUNK: /([^<]|<+[^<\/])+/";
    let value = r#"value: (CHUNK | "</" | "<")* "</" mark "parameter>\n""#;
    let start = start.replace("MARK", "mark");
    Ok(format!(
        "start: {start}\n{block}\n{}{value}\n{mark}\n{text}\n{chunk}\n",
        grammar.0.replace("MARK", "mark")
    ))
}

/// A schema in a grammar.
fn embedded(schema: Value) -> String {
    format!("%json {}", schema_of(schema))
}

/// Text that stands as it is.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

#[derive(Default)]
struct Grammar(String);

impl Grammar {
    fn line(&mut self, name: &str, rule: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{name}: {rule}");
    }

    fn rules(&mut self, rules: &CallRules) {
        let names = (0..rules.tools.len()).map(|index| format!("call{index}"));
        let call = names.collect::<Vec<_>>().join(" | ");
        let count = if rules.one_call { "" } else { "+" };
        self.line("calls", &format!("call{count} \"</\" MARK \"tool_calls>\""));
        self.line(
            "call",
            &format!("\"<\" MARK ({call}) \"</\" MARK \"invoke>\\n\""),
        );
        for (index, tool) in rules.tools.iter().enumerate() {
            self.tool(index, tool);
        }
        let open = r#""<" MARK "parameter name=\"" /[^"<>\\\n]+/ "\" string=\""#;
        self.line(
            "any",
            &format!(
                r#"{open}true\">" value | {open}false\">" {} end"#,
                embedded(json!({}))
            ),
        );
        self.line("end", r#""</" MARK "parameter>\n""#);
    }

    fn tool(&mut self, index: usize, tool: &ToolDefinition) {
        let empty = Map::new();
        let schema = &tool.parameters;
        let properties = schema.get("properties").and_then(Value::as_object);
        let properties = properties.unwrap_or(&empty);
        let required = schema.get("required").and_then(Value::as_array);
        let is_required = |name: &str| {
            required.is_some_and(|names| names.iter().any(|required| required == name))
        };
        let mut parts = vec![literal(&format!("invoke name=\"{}\">\n", tool.name))];
        for (number, (name, property)) in properties.iter().enumerate() {
            let rule = format!("parameter{index}x{number}");
            self.parameter(&rule, name, property, schema);
            parts.push(match is_required(name) {
                true => rule,
                false => format!("{rule}?"),
            });
        }
        // Names that the schema does not have, where it says nothing of them, are for tools that
        // have none.
        let others = match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => false,
            Some(_) => true,
            None => properties.is_empty(),
        };
        if others && tool.strict != Some(true) {
            parts.push("any*".into());
        }
        self.line(&format!("call{index}"), &parts.join(" "));
    }

    /// A parameter: strings as they are, anything else as JSON.
    fn parameter(&mut self, rule: &str, name: &str, property: &Value, schema: &Value) {
        let open = |is_string: bool| {
            let tag = format!("parameter name=\"{name}\" string=\"{is_string}\">");
            format!("\"<\" MARK {}", literal(&tag))
        };
        let strings = strings(property);
        let mut ways = Vec::new();
        match &strings {
            Strings::None => (),
            Strings::Any => ways.push(format!("{} value", open(true))),
            Strings::These(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                ways.push(format!("{} ({}) end", open(true), texts.join(" | ")));
            }
            Strings::Like(pattern) => {
                let pattern = with_slashes_escaped(pattern);
                ways.push(format!("{} /(?:{pattern})/ end", open(true)));
            }
        }
        if !is_string_alone(property) {
            let mut property = match property {
                // Anything.
                Value::Bool(true) => json!({}),
                property => property.clone(),
            };
            if let Value::Object(keywords) = &mut property {
                for name in DEFINITIONS {
                    if let Some(definitions) = schema.get(name) {
                        keywords.entry(name).or_insert(definitions.clone());
                    }
                }
                without_strings(keywords);
            }
            ways.push(format!("{} {} end", open(false), embedded(property)));
        }
        self.line(rule, &ways.join(" | "));
    }
}

/// Which strings a schema allows.
enum Strings {
    None,
    Any,
    These(Vec<String>),
    Like(String),
}

fn strings(schema: &Value) -> Strings {
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        let texts: Vec<String> = values
            .iter()
            .filter_map(Value::as_str)
            .map(Into::into)
            .collect();
        return match texts.is_empty() {
            true => Strings::None,
            false => Strings::These(texts),
        };
    }
    match (schema.get("const"), schema.get("type")) {
        (Some(Value::String(text)), _) => Strings::These(vec![text.clone()]),
        (Some(_), _) => Strings::None,
        (None, Some(Value::String(kind))) if kind == "string" => {
            match schema.get("pattern").and_then(Value::as_str) {
                // Only one that says all of the string can be followed in a grammar.
                Some(pattern) => match whole(pattern) {
                    Some(pattern) => Strings::Like(pattern.to_owned()),
                    None => Strings::Any,
                },
                None => Strings::Any,
            }
        }
        (None, Some(Value::Array(kinds))) if kinds.contains(&json!("string")) => Strings::Any,
        (None, Some(_)) => Strings::None,
        // Any of several, or anything.
        (None, None) => match schema.get("anyOf").and_then(Value::as_array) {
            Some(schemas)
                if schemas
                    .iter()
                    .all(|one| matches!(strings(one), Strings::None)) =>
            {
                Strings::None
            }
            Some(_) => Strings::Any,
            None if schema.get("$ref").is_some() => Strings::None,
            None => Strings::Any,
        },
    }
}

fn is_string_alone(schema: &Value) -> bool {
    let values = schema.get("enum").and_then(Value::as_array);
    values.is_some_and(|values| values.iter().all(Value::is_string))
        || schema.get("const").is_some_and(Value::is_string)
        || [json!("string"), json!(["string"])]
            .iter()
            .any(|kind| schema.get("type") == Some(kind))
}

/// What a pattern says between `^` and `$`, if these are all of its ends.
fn whole(pattern: &str) -> Option<&str> {
    let inner = pattern.strip_prefix('^')?.strip_suffix('$')?;
    let backslashes = inner.bytes().rev().take_while(|&byte| byte == b'\\');
    // Each way of several would have its own ends.
    (backslashes.count() % 2 == 0 && !inner.contains('|')).then_some(inner)
}

/// A regular expression for between slashes; one that is escaped already stays.
fn with_slashes_escaped(regex: &str) -> String {
    let (mut escaped, mut after_backslash) = (String::new(), false);
    for char in regex.chars() {
        if char == '/' && !after_backslash {
            escaped.push('\\');
        }
        after_backslash = char == '\\' && !after_backslash;
        escaped.push(char);
    }
    escaped
}

/// Leaves strings out of a schema that allows others, too: they are written as they are.
fn without_strings(keywords: &mut Map<String, Value>) {
    if let Some(Value::Array(kinds)) = keywords.get_mut("type") {
        kinds.retain(|kind| kind != "string");
    }
    if let Some(Value::Array(values)) = keywords.get_mut("enum") {
        values.retain(|value| !value.is_string());
    }
}

#[cfg(test)]
mod tests {
    use super::{whole, with_slashes_escaped};

    #[test]
    fn slashes_are_escaped_once() {
        assert_eq!(with_slashes_escaped("a/b"), r"a\/b");
        assert_eq!(with_slashes_escaped(r"https?:\/\/x"), r"https?:\/\/x");
        assert_eq!(with_slashes_escaped(r"a\\/b"), r"a\\\/b");
    }

    #[test]
    fn only_a_pattern_of_all_of_a_string_is_followed() {
        assert_eq!(whole("^[a-z]+$"), Some("[a-z]+"));
        for part in ["[a-z]+", "^a", "a$", r"^a\$", "^a|b$"] {
            assert_eq!(whole(part), None, "{part}");
        }
    }
}
