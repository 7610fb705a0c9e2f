"""What is known of the keywords of JSON schemas (draft 2020-12): enforced, or without effect.

Any other is refused by name. An answer that satisfies only what happened to be understood would be
worse than an error.
"""

from __future__ import annotations

ENFORCED = frozenset(
    {
        *("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"),
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        *("items", "prefixItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
# They say nothing about which values are valid. `discriminator` (OpenAPI) is a hint beside oneOf.
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "$comment", "$schema"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "nullable", "xml", "externalDocs"),
        *("enumNames", "enumDescriptions", "markdownDescription", "errorMessage", "propertyOrdering"),
        *("contentMediaType", "contentEncoding", "contentSchema", "$anchor", "$dynamicAnchor", "$vocabulary"),
    }
)
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)
TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})

# Keywords whose value is one schema, a list of schemas, or schemas by name.
ONE_SCHEMA = frozenset({"items", "additionalProperties"})
LIST_OF_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})

MAX_COUNT = 2**20
MAX_DEPTH = 64
