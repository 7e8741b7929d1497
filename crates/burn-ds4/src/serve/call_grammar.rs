//! Tool calls as a grammar of `llguidance`: the markup that prompts ask for, with arguments that
//! follow the schemas of the tools.

use std::collections::HashMap;
use std::fmt::Write;

use deepseek_recipe_core::tools::ToolDefinition;
use llguidance::api::TopLevelGrammar;
use llguidance::regex_to_lark;
use serde_json::Value;

use crate::conversation::{Encoding, MARK};
use crate::serve::call_schema::{NOTHING, Reader, Strings, Way, without_strings};
use crate::serve::grammar::{Unfit, Wanted, compiled};
use crate::serve::response_format::MAX_SCHEMA;
use crate::serve::schema::{bundled, document, multiples};

/// Most bytes of the schemas of all tools, each with what it refers to.
const MAX_SCHEMAS: usize = 4 * MAX_SCHEMA;
/// How errors of `llguidance` about schemas begin that nothing follows.
const UNSATISFIABLE: &str = "nsatisfiable";

/// Finds what is wrong with grammars.
pub trait Check {
    /// Whether one can be read.
    fn reads(&self, grammar: TopLevelGrammar) -> Result<(), String>;

    /// Whether something follows one, which takes longer.
    fn begins(&self, grammar: TopLevelGrammar) -> Result<(), String>;
}

/// The grammar, in the notation of Lark. `mark` is the token that marks tags.
pub fn lark(wanted: &Wanted, mark: u32, check: &dyn Check) -> Result<String, Unfit> {
    let (rules, start) = match wanted {
        Wanted::Calls(rules) => (rules, "calls".to_owned()),
        // Tags begin with "<", as other text may.
        Wanted::CallsOr(rules, None) => (rules, r#"(TEXT | "<")* ("<" mark block)?"#.to_owned()),
        Wanted::CallsOr(rules, Some(other)) => {
            let other = match &**other {
                Wanted::Json(schema) => embedded(&compiled(schema).map_err(Unfit::Format)?),
                Wanted::Regex(regex) => format!("/{}/", regex_to_lark(regex, "")),
                Wanted::Calls(_) | Wanted::CallsOr(..) => literal(""),
            };
            (rules, format!("{other} | /\\n{{0,2}}/ \"<\" mark block"))
        }
        Wanted::Json(_) | Wanted::Regex(_) => return Err(Unfit::Format("no calls".into())),
    };
    let (blank, block) = match rules.encoding {
        Encoding::V41Flash => (" ", "calls"),
        Encoding::V4 | Encoding::V4Flash0731 => ("", "tool_calls"),
    };
    let mut grammar = Grammar {
        text: String::new(),
        parts: HashMap::new(),
        bytes: 0,
        unmet: None,
        blank,
        check,
    };
    let mut calls = Vec::new();
    for (index, tool) in rules.tools.iter().enumerate() {
        let ways = grammar.tool(tool).map_err(|error| {
            Unfit::Tools(format!("the schema of tool `{}`: {error}", tool.name))
        })?;
        let open = literal(&format!("{blank}invoke name=\"{}\">\n", tool.name));
        let name = format!("call{index}");
        calls.extend(grammar.part(&format!("{open} ({ways})"), Some(name)));
    }
    let (call, count) = (calls.join(" | "), if rules.one_call { "" } else { "+" });
    Ok(format!(
        r#"start: {start}
block: "{blank}{block}>\n" calls
calls: call{count} "</" mark "{blank}{block}>"
call: "<" mark ({call}) "</" mark "{blank}invoke>\n"
end: mark "{blank}parameter>\n"
mark: <[{mark}]>
TEXT: /[^<]+/
{}"#,
        grammar.text
    ))
}

/// The documents of a schema.
fn embedded(schema: &Value) -> String {
    format!("%json {schema}")
}

/// Text that stands as it is.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

struct Grammar<'a> {
    text: String,
    /// Rules that schemas and expressions have, or `None` where nothing follows them.
    parts: HashMap<String, Option<String>>,
    /// Bytes of the schemas.
    bytes: usize,
    /// The last parameter that has to come, and can have no value.
    unmet: Option<String>,
    /// What follows the mark of a tag.
    blank: &'static str,
    check: &'a dyn Check,
}

impl Grammar<'_> {
    /// A terminal that expressions that are the same share; `None` where nothing matches.
    fn terminal(&mut self, expression: &str) -> Option<String> {
        if let Some(name) = self.parts.get(expression) {
            return name.clone();
        }
        let alone = TopLevelGrammar::from_lark(format!("start: X\nX: {expression}"));
        // Only what has to match several expressions may match nothing.
        let matches = match expression.contains('&') {
            true => self.check.begins(alone),
            false => self.check.reads(alone),
        };
        let name = matches.ok().map(|()| format!("TEXT{}", self.parts.len()));
        self.part(expression, name)
    }

    fn part(&mut self, part: &str, name: Option<String>) -> Option<String> {
        if let Some(name) = &name {
            // Writing to a string cannot fail.
            let _ = writeln!(self.text, "{name}: {part}");
        }
        self.parts.insert(part.into(), name.clone());
        name
    }

    /// Ways to write the arguments of a tool.
    fn tool(&mut self, tool: &ToolDefinition) -> Result<String, String> {
        let root = &tool.parameters;
        document(root)?;
        self.unmet = None;
        let mut reader = Reader::new(root);
        let mut ways = Vec::new();
        let possible = reader.ways(tool.strict == Some(true))?;
        if reader.one_of {
            // Whether several can be followed at a time is known to the compiler of JSON.
            let whole = compiled(&bundled(root, root)?)?;
            self.check.reads(TopLevelGrammar::from_json_schema(whole))?;
        }
        for way in possible {
            ways.extend(self.way(&mut reader, root, &way)?);
        }
        match ways.is_empty() {
            true => Err(match self.unmet.take() {
                Some(name) => format!("{NOTHING}: parameter `{name}` can have no value"),
                None => NOTHING.into(),
            }),
            false => Ok(ways.join(" | ")),
        }
    }

    fn way(
        &mut self,
        reader: &mut Reader<'_>,
        root: &Value,
        way: &Way,
    ) -> Result<Option<String>, String> {
        let mut parts = vec![literal("")];
        for (name, schema, required) in &way.parameters {
            if name.contains("\">") || name.contains(MARK) {
                return Err(format!("a call cannot have the name {name:?}"));
            }
            let value = self.value(reader, root, schema);
            let value = value.map_err(|error| format!("parameter `{name}`: {error}"))?;
            let blank = self.blank;
            let open = literal(&format!("{blank}parameter name=\"{name}\" string=\""));
            match (value, required) {
                (Some(value), true) => parts.push(format!("\"<\" mark {open} {value}")),
                (Some(value), false) => parts.push(format!("(\"<\" mark {open} {value})?")),
                (None, true) => {
                    self.unmet = Some(name.clone());
                    return Ok(None);
                }
                (None, false) => (),
            }
        }
        let others = way.others.as_ref().unwrap_or(&Value::Bool(false));
        let value = self.value(reader, root, others);
        let value = value.map_err(|error| format!("`additionalProperties`: {error}"))?;
        if let Some(value) = value {
            let names = way.parameters.iter().map(|(name, ..)| literal(name));
            let names: Vec<String> = names.collect();
            let others = match names.is_empty() {
                true => r#"/[^"<>\\\n]+/"#.to_owned(),
                false => format!(r#"/[^"<>\\\n]+/ & ~({})"#, names.join(" | ")),
            };
            if let Some(name) = self.terminal(&others) {
                let open = literal(&format!("{}parameter name=\"", self.blank));
                let kind = literal("\" string=\"");
                parts.push(format!("(\"<\" mark {open} {name} {kind} {value})*"));
            }
        }
        Ok(Some(parts.join(" ")))
    }

    /// What stands after `string="`: strings as they are, anything else as JSON.
    fn value(
        &mut self,
        reader: &mut Reader<'_>,
        root: &Value,
        schema: &Value,
    ) -> Result<Option<String>, String> {
        if self.json(root, schema)?.is_none() {
            return Ok(None);
        }
        let strings = reader.strings(schema)?;
        let json = match &strings {
            Strings::None | Strings::Quoted => self.json(root, schema)?,
            Strings::All | Strings::Like(_) => self.json(root, &without_strings(schema.clone()))?,
        };
        // A value ends where the token of the mark follows its closing tag.
        let text = match strings {
            Strings::None | Strings::Quoted => None,
            Strings::All => self.terminal(r#"/(?s:.*)/ "</""#),
            Strings::Like(expression) => self.terminal(&format!("({expression}) \"</\"")),
        };
        let text = text.map(|name| format!(r#""true\">" {name} end"#));
        let json = json.map(|name| format!(r#""false\">" {name} "</" end"#));
        let ways: Vec<String> = text.into_iter().chain(json).collect();
        Ok((!ways.is_empty()).then(|| format!("({})", ways.join(" | "))))
    }

    /// A rule of the documents of a schema; `None` where there are none.
    fn json(&mut self, root: &Value, schema: &Value) -> Result<Option<String>, String> {
        let schema = match bundled(root, schema)? {
            Value::Bool(false) => return Ok(None),
            Value::Bool(true) => Value::Object(serde_json::Map::new()),
            schema => schema,
        };
        let bytes = schema.to_string().len();
        let schema = compiled(&schema)?;
        let part = embedded(&schema);
        if let Some(name) = self.parts.get(&part) {
            return Ok(name.clone());
        }
        self.bytes += bytes;
        if self.bytes > MAX_SCHEMAS {
            let bytes = self.bytes;
            return Err(format!(
                "the schemas of this and earlier tools, each with what it refers to, have {bytes} \
                 bytes, at most {MAX_SCHEMAS}"
            ));
        }
        for numbers in multiples(&schema) {
            self.check
                .begins(TopLevelGrammar::from_json_schema(numbers))?;
        }
        let grammar = TopLevelGrammar::from_json_schema(schema);
        let name = match self.check.reads(grammar) {
            Ok(()) => Some(format!("json{}", self.parts.len())),
            Err(error) if error.contains(UNSATISFIABLE) => None,
            Err(error) => return Err(error),
        };
        Ok(self.part(&part, name))
    }
}

#[cfg(test)]
#[path = "call_grammar_tests.rs"]
mod tests;
