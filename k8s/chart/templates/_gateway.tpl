{{/* The gateway's pods. */}}

{{/* "true" if the gateway cannot read the model's tokenizer as it is: its image has no converter. */}}
{{- define "paceline.convertsModel" -}}
{{- $source := .Values.model.source -}}
{{- $builtIn := list "smollm2-135m-instruct" -}}
{{- $needed := or (has $source $builtIn) (hasSuffix ".gguf" $source) -}}
{{- if ternary $needed .Values.gateway.convertModel (kindIs "invalid" .Values.gateway.convertModel) -}}true{{- end -}}
{{- end -}}

{{/* Settings of the gateway as YAML. */}}
{{- define "paceline.gatewaySettings" -}}
{{ include "paceline.commonSettings" (dict "root" . "service" "gateway") }}
model: {{ .Values.model.source | quote }}
http_port: 8000
{{- with include "paceline.addresses" (dict "root" . "lane" "verifier") }}
verifiers: {{ . | quote }}
{{- end }}
{{- with include "paceline.addresses" (dict "root" . "lane" "drafter") }}
drafters: {{ . | quote }}
{{- end }}
{{- if include "paceline.apiKeysSecret" . }}
api_keys_file: /etc/paceline/api-keys/{{ .Values.apiKeys.key }}
{{- end }}
{{- if eq .Values.redis.mode "embedded" }}
redis_url: redis://:$(REDIS_PASSWORD)@{{ include "paceline.fullname" . }}-valkey:6379/0
{{- else if eq .Values.redis.mode "memory" }}
redis_url: memory://
{{- end }}
{{- with .Values.tls }}
{{- if .enabled }}
link_tls: true
link_tls_ca_file: /etc/paceline/link-ca/ca.crt
link_tls_server_name: {{ .serverName | quote }}
{{- if .mutual }}
link_tls_cert_file: /etc/paceline/link-tls/tls.crt
link_tls_key_file: /etc/paceline/link-tls/tls.key
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment that comes from secrets; the password first, because the URL refers to it. */}}
{{- define "paceline.redisEnv" -}}
{{- if eq .Values.redis.mode "embedded" }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "paceline.valkeySecret" . | quote }}
      key: {{ .Values.redis.embedded.auth.key | quote }}
{{- else if eq .Values.redis.mode "external" }}
- name: PACELINE_GATEWAY_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.external.existingSecret | quote }}
      key: {{ .Values.redis.external.key | quote }}
{{- end }}
{{- end -}}

{{- define "paceline.gatewayDeployment" -}}
{{- $root := .root -}}
{{- $values := $root.Values.gateway -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .target | quote }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels: {{- include "paceline.labels" . | nindent 4 }}
spec:
  {{- if not $values.autoscaling.enabled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  minReadySeconds: {{ $values.minReadySeconds }}
  progressDeadlineSeconds: {{ add $values.startupSeconds (include "paceline.graceSeconds" $root | int) $values.minReadySeconds 300 }}
  strategy: {{- toYaml $values.strategy | nindent 4 }}
  selector:
    matchLabels: {{- include "paceline.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "paceline.podLabels" . | nindent 8 }}
      {{- $mark := include "paceline.passwordMark" $root | fromYaml }}
      {{- with include "paceline.podAnnotations" (dict "root" $root "annotations" (merge (deepCopy $values.podAnnotations) $mark)) | trim }}{{ nindent 6 . }}{{ end }}
    spec:
      serviceAccountName: {{ include "paceline.gatewayAccount" $root | quote }}
      automountServiceAccountToken: {{ eq $root.Values.discovery.mode "kubernetes" }}
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ include "paceline.graceSeconds" $root }}
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "paceline.placement" $values | trim }}{{ nindent 6 . }}{{ end }}
      {{- with include "paceline.topologySpread" (merge (dict "constraints" $values.topologySpreadConstraints) .) | trim }}{{ nindent 6 . }}{{ end }}
      {{- if include "paceline.convertsModel" $root }}
      initContainers:
        - name: convert-model
          image: {{ include "paceline.image" (dict "root" $root "service" "verifier") | quote }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          command: [python, -c]
          args:
            - |
              {{- $root.Files.Get "files/convert_model.py" | nindent 14 }}
            - {{ $root.Values.model.source | quote }}
          env:
            {{- include "paceline.cacheEnv" $root | nindent 12 }}
          resources: {{- toYaml $values.convertResources | nindent 12 }}
          securityContext: {{- toYaml $root.Values.containerSecurityContext | nindent 12 }}
          volumeMounts:
            {{- include "paceline.commonMounts" $root | nindent 12 }}
      {{- end }}
      containers:
        - name: gateway
          image: {{ include "paceline.image" (dict "root" $root "service" "gateway") | quote }}
          imagePullPolicy: {{ $root.Values.images.pullPolicy }}
          ports:
            - {name: http, containerPort: 8000, protocol: TCP}
            - {name: grpc, containerPort: 7400, protocol: TCP}
            - {name: metrics, containerPort: 9400, protocol: TCP}
          env:
            {{- with include "paceline.redisEnv" $root | trim }}{{ nindent 12 . }}{{ end }}
            {{- include "paceline.cacheEnv" $root | nindent 12 }}
            {{- with include "paceline.settingsEnv" (dict "service" "gateway" "settings" (include "paceline.gatewaySettings" $root | fromYaml)) | trim }}{{ nindent 12 . }}{{ end }}
            {{- with include "paceline.settingsEnv" (dict "service" "gateway" "settings" $values.settings) | trim }}{{ nindent 12 . }}{{ end }}
            {{- with $values.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- include "paceline.probes" (dict "startupSeconds" $values.startupSeconds "port" (include "paceline.grpcPort" "gateway")) | nindent 10 }}
          {{- with include "paceline.lifecycle" $root | trim }}{{ nindent 10 . }}{{ end }}
          resources: {{- toYaml $values.resources | nindent 12 }}
          securityContext: {{- toYaml $root.Values.containerSecurityContext | nindent 12 }}
          volumeMounts:
            {{- include "paceline.commonMounts" $root | nindent 12 }}
            {{- range $volume := include "paceline.gatewaySecrets" $root | fromJsonArray }}
            - {name: {{ $volume.name }}, mountPath: /etc/paceline/{{ $volume.name }}, readOnly: true}
            {{- end }}
            {{- with $values.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- include "paceline.commonVolumes" $root | nindent 8 }}
        - name: cache
          emptyDir:
            sizeLimit: {{ $values.cacheSize }}
        {{- range $volume := include "paceline.gatewaySecrets" $root | fromJsonArray }}
        - name: {{ $volume.name }}
          secret:
            secretName: {{ $volume.secret | quote }}
            defaultMode: 0440
            {{- with $volume.key }}
            items: [{key: {{ . | quote }}, path: {{ . | quote }}}]
            {{- end }}
        {{- end }}
        {{- with $values.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end -}}

{{/* Secrets that are mounted under /etc/paceline, as JSON: name of the volume, secret, and key where one is enough. */}}
{{- define "paceline.gatewaySecrets" -}}
{{- $found := list -}}
{{- with include "paceline.apiKeysSecret" . -}}
{{- $found = append $found (dict "name" "api-keys" "secret" . "key" $.Values.apiKeys.key) -}}
{{- end -}}
{{- with .Values.tls -}}
{{- if .enabled -}}
{{- /* The authority only: the replicas' key is none of the gateway's business. */ -}}
{{- $found = append $found (dict "name" "link-ca" "secret" .serverSecret "key" "ca.crt") -}}
{{- if .mutual -}}
{{- $found = append $found (dict "name" "link-tls" "secret" .clientSecret) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
