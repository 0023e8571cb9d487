"""Chat templates written for these tests, with the rules that models of each family are strict about."""

# The rules of Qwen3.5: one system message at the start only, at least one user message, calls as XML-like
# text from a mapping, reasoning kept in the current turn only, the reply opened with a thought.
QWEN35 = r"""
{%- macro call(function) %}
    {{- '<tool_call>\n<function=' + function.name + '>\n' }}
    {%- for name, value in function.arguments|items %}
        {{- '<parameter=' + name + '>\n' }}
        {{- value if value is string else value|tojson }}
        {{- '\n</parameter>\n' }}
    {%- endfor %}
    {{- '</function>\n</tool_call>' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool|tojson }}{%- endfor %}
    {{- '\n</tools>' }}
    {%- if messages[0].role == 'system' %}{{- '\n\n' + messages[0].content|trim }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content|trim + '<|im_end|>\n' }}
{%- endif %}
{%- set state = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set state.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if state.question < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content|trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > state.question %}
            {{- '<think>\n' + (message.reasoning_content or '')|trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- ('\n\n' if content or not loop.first else '') + call(tool_call.function) }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}
"""

# The same, which also sees: an image is three control tokens in its place.
_SHOW = r"""
{%- macro show(content, sees) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}
                {%- if not sees %}{{- raise_exception('System message cannot contain images.') }}{%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
SEEING = _SHOW + QWEN35.replace(
    "message.content|trim", "show(message.content, message.role != 'system')|trim"
)

# Insists that user and assistant take turns, as older families do.
TURNS = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {{- '[' + message.role + '] ' + message.content + eos_token }}
{%- endfor %}
"""
