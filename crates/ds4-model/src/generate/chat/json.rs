//! JSON that keeps the order of keys and prints as the reference encoder does (Python's
//! `json.dumps` without ASCII escapes): the model was trained on tool schemas in that form only.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value with ordered keys.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Integer(i128),
    Float(f64),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    /// The value of a key, `None` also where this is not an object.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(entries) => entries
                .iter()
                .find(|entry| entry.0 == key)
                .map(|entry| &entry.1),
            _ => None,
        }
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) => write_float(f, *value),
            Self::String(value) => write_string(f, value),
            Self::Array(values) => {
                f.write_str("[")?;
                for (index, value) in values.iter().enumerate() {
                    f.write_str(if index == 0 { "" } else { ", " })?;
                    write!(f, "{value}")?;
                }
                f.write_str("]")
            }
            Self::Object(entries) => {
                f.write_str("{")?;
                for (index, (key, value)) in entries.iter().enumerate() {
                    f.write_str(if index == 0 { "" } else { ", " })?;
                    write_string(f, key)?;
                    write!(f, ": {value}")?;
                }
                f.write_str("}")
            }
        }
    }
}

fn write_string(f: &mut fmt::Formatter<'_>, value: &str) -> fmt::Result {
    // serde_json escapes the same characters in the same way.
    f.write_str(&serde_json::to_string(value).map_err(|_| fmt::Error)?)
}

/// Shortest digits that round-trip, with an exponent below 1e-4 and from 1e16 on.
fn write_float(f: &mut fmt::Formatter<'_>, value: f64) -> fmt::Result {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').ok_or(fmt::Error)?;
    let exponent: i32 = exponent.parse().map_err(|_| fmt::Error)?;
    match exponent {
        -4..=15 => write!(f, "{value:?}"),
        _ => write!(
            f,
            "{digits}e{}{:02}",
            if exponent < 0 { '-' } else { '+' },
            exponent.abs()
        ),
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Integer(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::String(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = access.next_element()? {
            values.push(value);
        }
        Ok(Json::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut entries: Vec<(String, Json)> = Vec::new();
        while let Some((key, value)) = access.next_entry::<String, Json>()? {
            // A repeated key keeps its first place and its last value.
            match entries.iter_mut().find(|entry| entry.0 == key) {
                Some(entry) => entry.1 = value,
                None => entries.push((key, value)),
            }
        }
        Ok(Json::Object(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(text: &str) -> String {
        Json::parse(text).unwrap().to_string()
    }

    #[test]
    fn keys_keep_their_order_and_separators_have_one_space() {
        let text = "{\"z\":1,\n\"a\" : [true,null , false],\"m\":{}, \"e\":[]}";
        assert_eq!(
            printed(text),
            r#"{"z": 1, "a": [true, null, false], "m": {}, "e": []}"#
        );
    }

    #[test]
    fn a_repeated_key_keeps_its_first_place_and_last_value() {
        assert_eq!(
            printed(r#"{"a": 1, "b": 2, "a": 3}"#),
            r#"{"a": 3, "b": 2}"#
        );
    }

    #[test]
    fn strings_are_escaped_only_where_json_demands_it() {
        assert_eq!(
            printed(r#""\u00e9世\n\t\"\\\/\u0001\u007f""#),
            "\"é世\\n\\t\\\"\\\\/\\u0001\u{7f}\""
        );
    }

    #[test]
    fn numbers_print_as_python_prints_them() {
        let cases = [
            ("0", "0"),
            ("-7", "-7"),
            ("18446744073709551615", "18446744073709551615"),
            ("1.0", "1.0"),
            ("0.1", "0.1"),
            ("1e2", "100.0"),
            ("-2.5E-4", "-0.00025"),
            ("0.00001", "1e-05"),
            ("1.5e-7", "1.5e-07"),
            ("123456789012345.0", "123456789012345.0"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1.25e100", "1.25e+100"),
            ("-0.0", "-0.0"),
            // All 17 digits count.
            ("1.4302060167127721", "1.4302060167127721"),
            ("0.12084992817599587", "0.12084992817599587"),
            ("3.5261713982797334", "3.5261713982797334"),
        ];
        for (text, expected) in cases {
            assert_eq!(printed(text), expected, "{text}");
        }
    }

    #[test]
    fn text_that_is_not_json_or_nests_without_end_is_an_error() {
        for text in [
            "",
            "{",
            "{\"a\" 1}",
            "[1,]",
            "nul",
            "1 2",
            &"[".repeat(100_000),
        ] {
            assert!(Json::parse(text).is_err());
        }
    }
}
